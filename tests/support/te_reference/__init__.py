"""Transformer Engine's real Python on a CPU: its compiled extension written in plain torch.

A process that is started with ``environment(version)`` can ``import transformer_engine``: the pure
wheel, which ``scripts/test.sh`` puts below ``.venv-te/``, runs over the kernels of this package
instead of ``transformer_engine_torch``. What a dense bf16 or fp32 layer calls is here; every other
name of the extension raises NotImplementedError, naming itself, when it is called. What the kernels
give back to be saved has the shape and the type that the CUDA kernels give it, so that a tape sees
the same bytes. ``flash_attn`` is stood in for as well.

    CALLS["generic_gemm"]        # kernels called in this process, by the extension's own names

This module imports nothing but the standard library: it is read at the start of every process.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
VERSIONS = ("2.17.1", "2.14.1", "2.20.2")
"""The version that megatron-core 0.19 names, the one that 0.17 does, and the newest."""
DEFAULT_VERSION = VERSIONS[0]

CALLS: Counter[str] = Counter()
"""How often each kernel was called in this process; a test may ``clear()`` it."""


class Settings:
    """What a test may change about the kernels, in the process that calls them."""

    attention_moves_generator = True
    """cuDNN's attention moves the default generator on even where nothing is dropped; off, it draws only
    for dropout, as flash attention does."""


def folder_of(version: str) -> Path:
    """Where the wheel of ``version`` is; FileNotFoundError with the command that installs it if it is not."""
    folder = REPOSITORY / ".venv-te" / version
    if not (folder / "transformer_engine").is_dir():
        raise FileNotFoundError(
            f"Transformer Engine {version} is not in {folder}: "
            f'bash -c "source scripts/setup_env.sh && lynx_te {version}" installs it'
        )
    return folder


def folders(version: str) -> list[Path]:
    """What a Python process needs in front of its path to find Transformer Engine over the reference.

    The first holds a ``sitecustomize``, which registers the reference before anything is imported.
    """
    return [Path(__file__).with_name("site"), folder_of(version)]


def environment(version: str = DEFAULT_VERSION) -> dict[str, str]:
    """``PYTHONPATH`` for subprocesses (torchrun, ``lynx run``), which need no code of their own."""
    path = [*folders(version), REPOSITORY, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(str(entry) for entry in path if entry)}
