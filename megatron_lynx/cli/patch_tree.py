"""Patches carried out on a tree of files: all of a series or nothing, any number of times, and back.

A hunk is found by its lines, not by its line number: a release's files may have moved on. Its lines must
stand in the file exactly once, so that nothing is patched that only looks alike.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lynx.errors import ConfigError

Lines = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines as they are before and after; one of the two is looked for."""

    old: Lines
    new: Lines


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The hunks of one file, whose path is relative to the tree."""

    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A file, what it holds, and what it is to hold."""

    path: Path
    before: bytes
    after: bytes

    @property
    def needed(self) -> bool:
        """Whether anything is to change."""
        return self.before != self.after


def read_series(folder: Path) -> list[FilePatch]:
    """The patches that ``folder/series`` names, in that order."""
    names = (folder / "series").read_text("utf-8").split()
    return [_parse((folder / name).read_bytes(), folder / name) for name in names]


def _parse(text: bytes, name: Path) -> FilePatch:
    lines = text.splitlines(keepends=True)
    start = next((i for i, line in enumerate(lines) if line.startswith(b"+++ b/")), None)
    if start is None:
        raise ConfigError(f"{name} names no file: a line such as `+++ b/pretrain_gpt.py` is missing")
    hunks: list[list[bytes]] = []
    for line in lines[start + 1 :]:
        if re.match(rb"@@ -\d+(,\d+)? \+\d+(,\d+)? @@", line):
            hunks.append([])
        elif line[:1] in (b" ", b"-", b"+") and hunks:
            hunks[-1].append(line)
        else:
            raise ConfigError(f"{name}: {line!r} is no line of a patch")
    return FilePatch(
        lines[start].removeprefix(b"+++ b/").strip().decode(),
        tuple(
            Hunk(
                tuple(line[1:] for line in hunk if line[:1] != b"+"),
                tuple(line[1:] for line in hunk if line[:1] != b"-"),
            )
            for hunk in hunks
        ),
    )


def changes(tree: Path, patches: Sequence[FilePatch], *, revert: bool = False) -> list[Change]:
    """What applying (or reverting) would do to each file; nothing is written. Hunks that are applied
    (or reverted) already change nothing.

    Raises:
        ConfigError: a file is missing, or has neither the lines before nor those after; names it.
    """
    found = []
    for patch in patches:
        path = tree / patch.path
        try:
            before = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; nothing was changed") from error
        lines = before.splitlines(keepends=True)
        for hunk in patch.hunks:
            _carry_out(lines, hunk, path, revert=revert)
        found.append(Change(path, before, b"".join(lines)))
    return found


def _carry_out(lines: list[bytes], hunk: Hunk, path: Path, *, revert: bool) -> None:
    """Replace the lines of ``hunk`` in ``lines``."""
    # The lines after come first: where a patch only adds, the lines before stand inside them.
    applied, plain = _places(lines, hunk.new), []
    if not applied:
        plain = _places(lines, hunk.old)
    if len(applied) + len(plain) != 1:
        added = next(line for line in hunk.new if line not in hunk.old).strip().decode()
        context = hunk.old[-1].strip().decode()
        count = len(applied) + len(plain)
        how = f"{count} times" if count else "nowhere"
        raise ConfigError(
            f"{path} is not as in the release that the patch is for: the line `{context}`, where "
            f"`{added}` belongs, was found {how}; nothing was changed"
        )
    if applied and revert:
        lines[applied[0] : applied[0] + len(hunk.new)] = hunk.old
    elif plain and not revert:
        lines[plain[0] : plain[0] + len(hunk.old)] = hunk.new


def _places(lines: Sequence[bytes], wanted: Lines) -> list[int]:
    return [i for i in range(len(lines) - len(wanted) + 1) if tuple(lines[i : i + len(wanted)]) == wanted]


def write(todo: Sequence[Change]) -> None:
    """Write every change, or none.

    Raises:
        ConfigError: a file could not be written; all are as they were.
    """
    done: list[Change] = []
    for change in todo:
        try:
            _replace(change.path, change.after)
        except OSError as error:
            for earlier in done:
                _replace(earlier.path, earlier.before)
            raise ConfigError(
                f"{change.path} cannot be written: {error.strerror or error}; every file is as it was"
            ) from error
        done.append(change)


def _replace(path: Path, content: bytes) -> None:
    """Write through a file beside it, so that no reader ever sees half a file; a link stays a link."""
    target = path.resolve()
    draft = target.with_name(f"{target.name}.lynx-{os.getpid()}")
    try:
        draft.write_bytes(content)
        shutil.copymode(target, draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
