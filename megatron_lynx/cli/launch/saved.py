"""The arguments that a Megatron checkpoint saved, as flags."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_lynx.checkpoint import Inert, read_checkpoint
from megatron_lynx.cli.launch.yaml import INVERSE, RENAMED


def is_checkpoint(path: str) -> bool:
    """Whether ``--from-args`` names a checkpoint: a folder, or a file of torch's."""
    return Path(path).is_dir() or path.endswith(".pt")


def checkpoint_words(path: str, wanted: Callable[[str], bool]) -> list[str]:
    """The flags of the job that wrote a checkpoint, as far as they are wanted.

    Raises:
        ConfigError: there is none, or it holds no arguments.
    """
    saved = read_checkpoint(Path(path), f"--from-args {path!r}")
    flags = [_words(field, value) for field, value in vars(saved.arguments).items()]
    return [word for words in flags if words and wanted(words[0][2:]) for word in words]


def _words(field: str, value: Any) -> list[str]:
    if isinstance(value, Enum | Inert):
        return []
    if field in INVERSE:
        return [f"--{INVERSE[field]}"] if value is False else []
    flag = "--" + RENAMED.get(field, field.replace("_", "-"))
    if value is None or value is False or value == []:
        return []
    if value is True:
        return [flag]
    return [flag, *map(str, value)] if isinstance(value, list | tuple) else [flag, str(value)]
