"""A small real dataset from what every Python has: the source files of its standard library.

    python -m megatron_lynx.integration.dataset OUT_PREFIX

writes ``OUT_PREFIX.bin`` and ``OUT_PREFIX.idx`` in Megatron's format, one document per source file,
one token per byte. Train on it with ``dataset_arguments(OUT_PREFIX)``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

from megatron_lynx.errors import ConfigError

# 256 bytes and the end of a document, which NullTokenizer takes to be the last token.
VOCABULARY_SIZE = 257
END_OF_DOCUMENT = 256

DEFAULT_SIZE_BYTES = 4 * 1024 * 1024

# Raised when the same sources would give another file; a cached file of another version is rebuilt.
_FORMAT = 1


def dataset_arguments(prefix: Path) -> list[str]:
    """Megatron's flags for training on the dataset at ``prefix``."""
    return [
        *("--data-path", str(prefix)),
        *("--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", str(VOCABULARY_SIZE)),
        *("--split", "98,1,1"),
    ]


def build_dataset(prefix: Path, size_bytes: int = DEFAULT_SIZE_BYTES, source: Path | None = None) -> Path:
    """Write the dataset to ``prefix`` unless it is there already; returns ``prefix``.

    The files of ``source`` (this Python's standard library if None) are taken in sorted order, without
    those that would exceed ``size_bytes``, so the same Python gives the same dataset.
    """
    source = source if source is not None else Path(sysconfig.get_paths()["stdlib"])
    files = list(_sources(source, size_bytes))
    if not files:
        raise ConfigError(f"{source}: no Python source of at most {size_bytes} bytes to make a dataset from")
    stamp_path = prefix.with_name(prefix.name + ".json")
    stamp = json.dumps({"format": _FORMAT, "sources": _digest(source, files)})
    written = [stamp_path, Path(get_bin_path(str(prefix))), Path(get_idx_path(str(prefix)))]
    if all(path.exists() for path in written) and stamp_path.read_text() == stamp:
        return prefix
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Several ranks may build at once: each writes files of its own, and a rename is atomic.
    draft = prefix.with_name(f"{prefix.name}.{os.getpid()}")
    builder = IndexedDatasetBuilder(get_bin_path(str(draft)), dtype=np.uint16)
    for file in files:
        tokens = np.append(np.frombuffer(file.read_bytes(), dtype=np.uint8), np.uint16(END_OF_DOCUMENT))
        builder.add_document(torch.from_numpy(tokens.astype(np.int64)), [len(tokens)])
    builder.finalize(get_idx_path(str(draft)))
    for finish in (get_bin_path, get_idx_path):
        os.replace(finish(str(draft)), finish(str(prefix)))
    stamp_path.write_text(stamp)
    return prefix


def _sources(source: Path, size_bytes: int) -> Iterator[Path]:
    """The library's own modules, without its tests and what was installed beside it."""
    left = size_bytes
    for file in sorted(source.glob("**/*.py")):
        parts = file.relative_to(source).parts
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(parts):
            continue
        size = file.stat().st_size
        if 0 < size <= left:
            left -= size
            yield file


def _digest(source: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(source)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Build the dataset at the prefix that the command line names."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m megatron_lynx.integration.dataset OUT_PREFIX", file=sys.stderr)
        return 2
    prefix = build_dataset(Path(argv[0]))
    size = Path(get_bin_path(str(prefix))).stat().st_size // np.dtype(np.uint16).itemsize
    print(f"{prefix}.bin, {prefix}.idx: {size} tokens\ntrain with: {' '.join(dataset_arguments(prefix))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
