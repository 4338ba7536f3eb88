"""What a Megatron checkpoint says of itself, read without torch.

Up to 0.18 ``common.pt`` (or ``model_optim_rng.pt``), a zip file with one pickle; from 0.19 on such a file
lies within one of the ``.distcp`` files, and ``.metadata``, a pickle, says where. Only plain containers and
numbers are wanted: every other class becomes an inert stand-in, and no tensor is read.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_lynx.errors import ConfigError

_INDEX = ".metadata"
_NAMES = ("common.pt", "model_optim_rng.pt", _INDEX)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint: the file that was read, the arguments of the run that wrote it, and how it cut the
    distributed optimizer's state (``dp_reshardable``, ``fully_reshardable``; None without one)."""

    file: Path
    arguments: Namespace
    optimizer_sharding: str | None


def read_checkpoint(path: Path, flag: str) -> Saved:
    """Read a checkpoint: its file, or a folder that holds it or the last of several.

    Raises:
        ConfigError: names ``flag``; there is none, or it holds no arguments.
    """
    file = path if path.is_file() else _file(path, flag)
    try:
        state = _within(file) if file.name == _INDEX else _unzipped(file)
    except (
        *(OSError, zipfile.BadZipFile, StopIteration, pickle.UnpicklingError),
        *(AttributeError, EOFError, KeyError, IndexError),
    ) as error:
        raise ConfigError(
            f"{flag}: {file.name} is not a checkpoint of torch's ({error}); common.pt is"
        ) from error
    arguments = state.get("args") if isinstance(state, Mapping) else None
    if not isinstance(arguments, Namespace):
        raise ConfigError(f"{flag}: {file.name} holds no arguments; a launch script works")
    metadata = state.get("content_metadata")
    sharding = metadata.get("distrib_optim_sharding_type") if isinstance(metadata, Mapping) else None
    return Saved(file, arguments, sharding)


def latest_iteration(folder: Path) -> str | None:
    """What the folder of a run's checkpoints says about the last one; None if there is none yet."""
    latest = folder / "latest_checkpointed_iteration.txt"
    return latest.read_text("utf-8").strip() if latest.is_file() else None


def iteration_folder(folder: Path, iteration: str) -> Path:
    """Where Megatron puts the checkpoint of an iteration."""
    return folder / (f"iter_{int(iteration):07d}" if iteration.isdigit() else iteration)


def _file(folder: Path, flag: str) -> Path:
    latest = latest_iteration(folder)
    if latest is not None:
        folder = iteration_folder(folder, latest)
    found = [path for name in _NAMES for path in sorted(folder.rglob(name))]
    if not found:
        raise ConfigError(
            f"{flag} is a folder without {' or '.join(_NAMES[:2])}; a checkpoint's folder works"
        )
    return found[0]


def _unzipped(file: Path | BinaryIO) -> Any:
    """What ``torch.save`` put into a file."""
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        with archive.open(name) as stream:
            return _Reader(stream).load()


def _within(index: Path) -> Any:
    """The same, from the piece of a ``.distcp`` file that the index names."""
    with index.open("rb") as stream:
        pieces = _Reader(stream).load().storage_data
    place = next(place for piece, place in pieces.items() if piece.fqn.startswith("common_state"))
    with (index.parent / place.relative_path).open("rb") as stream:
        stream.seek(place.offset)
        return _unzipped(io.BytesIO(stream.read(place.length)))[0]


class Inert:
    """Any object: it has the attributes that were saved, and does nothing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __call__(self, *arguments: Any) -> Inert:
        return self


class _Reader(pickle.Unpickler):
    """Reads containers and a namespace; imports nothing that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        """Plain containers; an inert class for all else."""
        allowed = {"argparse.Namespace": Namespace, "collections.OrderedDict": OrderedDict}
        return allowed.get(f"{module}.{name}", Inert)

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage."""
        return Inert()
