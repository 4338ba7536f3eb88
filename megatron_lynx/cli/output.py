"""Files that commands write: refused before the work if they could not be written, and written after it."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_lynx.errors import ConfigError


def check_writable(flag: str, path: Path) -> None:
    """Refuse a file that could not be written at the end, before anything is searched or measured.

    Raises:
        ConfigError: its folder is missing or closed, or it is a folder itself.
    """
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} '{path}': there is no folder {folder}; {flag} {path.name} works")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} '{path}' cannot be written; a file in a folder of your own works")


def write_text(text: str, path: str | Path, flag: str, works: str) -> None:
    """Write what ``flag`` asks for; ``works`` is a name that would do.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"{flag} {str(path)!r} cannot be written ({error}); {flag} {works} works"
        ) from error


def read_text(path: str, flag: str, works: str) -> str:
    """What the file that ``flag`` asks for holds so far; nothing if it is not there.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text("utf-8") if Path(path).exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path!r} cannot be read ({error}); {flag} {works} works") from error
