"""The arguments that a Megatron checkpoint saved, read without torch.

``common.pt`` (or ``model_optim_rng.pt``) is a zip file with one pickle. Only the namespace ``args`` is
wanted: every class but plain containers becomes an inert stand-in, and no tensor is read.
"""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_lynx.cli.launch.yaml import INVERSE, RENAMED
from megatron_lynx.errors import ConfigError

_NAMES = ("common.pt", "model_optim_rng.pt")


def is_checkpoint(path: str) -> bool:
    """Whether ``--from-args`` names a checkpoint: a folder, or a file of torch's."""
    return Path(path).is_dir() or path.endswith(".pt")


def checkpoint_words(path: str, wanted: Callable[[str], bool]) -> list[str]:
    """The flags of the job that wrote a checkpoint, as far as they are wanted.

    Raises:
        ConfigError: there is none, or it holds no arguments.
    """
    flag = f"--from-args {path!r}"
    file = Path(path) if Path(path).is_file() else _file(Path(path), flag)
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as stream:
                state = _Reader(stream).load()
    except (
        OSError,
        zipfile.BadZipFile,
        StopIteration,
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
    ) as error:
        raise ConfigError(
            f"{flag}: {file.name} is not a checkpoint of torch's ({error}); common.pt is"
        ) from error
    arguments = state.get("args") if isinstance(state, Mapping) else None
    if not isinstance(arguments, Namespace):
        raise ConfigError(f"{flag}: {file.name} holds no arguments; a launch script works")
    flags = [_words(field, value) for field, value in vars(arguments).items()]
    return [word for words in flags if words and wanted(words[0][2:]) for word in words]


def _file(folder: Path, flag: str) -> Path:
    latest = folder / "latest_checkpointed_iteration.txt"
    if latest.is_file():
        iteration = latest.read_text("utf-8").strip()
        folder /= f"iter_{int(iteration):07d}" if iteration.isdigit() else iteration
    found = [path for name in _NAMES for path in sorted(folder.rglob(name))]
    if not found:
        raise ConfigError(f"{flag} is a folder without {' or '.join(_NAMES)}; a checkpoint's folder works")
    return found[0]


def _words(field: str, value: Any) -> list[str]:
    if isinstance(value, Enum | _Inert):
        return []
    if field in INVERSE:
        return [f"--{INVERSE[field]}"] if value is False else []
    flag = "--" + RENAMED.get(field, field.replace("_", "-"))
    if value is None or value is False or value == []:
        return []
    if value is True:
        return [flag]
    return [flag, *map(str, value)] if isinstance(value, list | tuple) else [flag, str(value)]


class _Inert:
    """Any object that is not wanted."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> _Inert:
        return self


class _Reader(pickle.Unpickler):
    """Reads containers and a namespace; imports nothing that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        """Plain containers; an inert class for all else."""
        allowed = {"argparse.Namespace": Namespace, "collections.OrderedDict": OrderedDict}
        return allowed.get(f"{module}.{name}", _Inert)

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage."""
        return _Inert()
