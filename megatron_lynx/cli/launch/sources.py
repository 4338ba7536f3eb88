"""``--from-args FILE`` and ``-- COMMAND``: where a job's words come from.

A file may be a launch script (bash reads it, see ``capturing``), a list of Megatron's arguments, what
``lynx capture`` wrote (one launch a line), or YAML (``launch.yaml``).
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lynx.cli.launch.capturing import Captured, Launch, capture
from megatron_lynx.cli.launch.saved import checkpoint_words, is_checkpoint
from megatron_lynx.cli.launch.words import launch_of, split
from megatron_lynx.cli.launch.yaml import yaml_words
from megatron_lynx.errors import ConfigError

_MODEL = ("--num-layers", "--hidden-size", "--yaml-cfg", "--use-checkpoint-args", "--model-size")
_TRAINING = ("--micro-batch-size", "--global-batch-size", "--train-iters", "--train-samples", "--lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The launch to plan: ``launch``, of which only the words are known for a bare list of arguments;
    ``unset`` names variables that the script used without a value; ``notes`` what was not run."""

    launch: Launch
    unset: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def from_command(words: Sequence[str], number: int | None = None) -> Source:
    """The launch of a command line after ``--``: a launcher's, or a script's, which is captured.

    Raises:
        ConfigError: it starts nothing that trains.
    """
    if not words:
        raise ConfigError("-- is followed by no command; `-- torchrun ... pretrain_gpt.py ...` works")
    script = next((word for word in words[:2] if word.endswith((".sh", ".slurm", ".sbatch"))), None)
    is_script = os.path.basename(words[0]) in ("bash", "sh", "sbatch") or script == words[0]
    if is_script and words[1:2] not in (["-c"], ["-lc"]):
        return _captured(words, number, f"-- {shlex.join(words)}")
    return Source(launch=launch_of(words, dict(os.environ)))


def from_file(path: str, number: int | None, saved: Callable[[str], bool]) -> Source:
    """The launch that a file describes; ``number`` chooses one of several, ``saved`` says which of a
    checkpoint's arguments are wanted.

    Raises:
        ConfigError: unreadable, or it holds nothing that trains.
    """
    if is_checkpoint(path):
        words = tuple(checkpoint_words(path, saved))
        return Source(launch=Launch(argv=words), notes=("flags as the checkpoint saved them",))
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-args {path!r} cannot be read ({error}); a launch script works") from error
    flag = f"--from-args {path!r}"
    first = next((line for line in text.splitlines() if line.strip() and line.strip()[0] != "#"), "").strip()
    if first.startswith("--") and not text.startswith("#!"):
        return Source(launch=Launch(argv=tuple(_list(text, flag))))
    if first.startswith("{"):
        return Source(launch=choose(_lines(text, flag), number, flag))
    if path.endswith((".yaml", ".yml")):
        return Source(launch=Launch(argv=tuple(yaml_words(text, flag))))
    if "\r\n" in text:
        raise ConfigError(
            f"{flag} has Windows line ends, which bash cannot run; `sed -i 's/\\r$//' {path}` mends it"
        )
    if "\0" in text:
        raise ConfigError(f"{flag} is no text; a launch script works")
    command = ["sbatch", path] if "\n#SBATCH" in text else ["bash", path]
    return _captured(command, number, flag)


def _list(text: str, flag: str) -> list[str]:
    """The words of a list of arguments: quotes as in a shell, ``#`` comments, nothing expanded."""
    lines = text.replace("\r\n", "\n").replace("\\\n", " ")
    try:
        words = shlex.split(lines, comments=True)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}; closed quotes work") from error
    for word in words:
        if "$" in word and "'" not in word:
            raise ConfigError(
                f"{flag}: {word!r} is a variable, and a list of arguments is read as it stands; a script "
                "that begins with #!/bin/bash works"
            )
    return words


def _lines(text: str, flag: str) -> list[Launch]:
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{flag} is not what `lynx capture` writes ({error})") from error
        found.append(Launch.from_json(data))
    return found


def _captured(words: Sequence[str], number: int | None, flag: str) -> Source:
    found = capture(words, restricted=True)
    if not found.launches:
        raise ConfigError(f"{flag} started nothing{_why(found)}; {_free(words)}")
    return Source(
        launch=choose(found.launches, number, flag, _why(found)),
        unset=found.unset,
        notes=tuple(found.notes()),
    )


def _free(words: Sequence[str]) -> str:
    own = words[1:] if words[0] in ("bash", "sh", "sbatch") else words
    return f"`lynx capture -- bash {shlex.join(own)}` runs it with stand-ins for launchers only"


def _why(found: Captured) -> str:
    """How a script that did not do what was hoped for ended."""
    parts = [f"it ended with code {found.code}"] if found.code else []
    parts += [f"its last words: {found.last_words[:200]}"] if found.last_words else []
    parts += [f"not run: {', '.join(found.skipped)}"] if found.skipped else []
    parts += [f"unset: {', '.join(found.unset)}"] if found.unset else []
    return f" ({'; '.join(parts)})" if parts else ""


def is_training(launch: Launch) -> bool:
    """Whether a launch trains a model: it has a shape and a batch."""
    names = {word.split("=")[0] for word in split(launch.argv)[1]}
    return bool(names.intersection(_MODEL)) and bool(names.intersection(_TRAINING))


def choose(launches: Sequence[Launch], number: int | None, flag: str, why: str = "") -> Launch:
    """The launch that trains, or the one that ``--launch`` names.

    Raises:
        ConfigError: none trains, or several do, with different words.
    """
    training = list(dict.fromkeys(map(_same, filter(is_training, launches))))
    if number is not None:
        if not 1 <= number <= len(training):
            raise ConfigError(f"--launch {number}: {flag} starts {len(training)} trainings; 1 is the first")
        return _found(launches, training[number - 1])
    if not training:
        named = ", ".join(" ".join(launch.argv[:3]) for launch in launches[:3])
        raise ConfigError(
            f"{flag} holds no flag of Megatron with which something trains"
            + (f" (it starts {named})" if named else "")
            + f"{why}; a script with --num-layers 24 and --micro-batch-size 1 does"
        )
    if len(training) > 1:
        raise ConfigError(
            f"{flag} starts {len(training)} different trainings; --launch 1 to --launch {len(training)} "
            "chooses one, `lynx capture` lists them"
        )
    return _found(launches, training[0])


def _same(launch: Launch) -> tuple[str, ...]:
    """What tells two trainings apart: a node's rank and an address do not."""
    return split(launch.argv)[1]


def _found(launches: Sequence[Launch], words: tuple[str, ...]) -> Launch:
    return next(launch for launch in launches if split(launch.argv)[1] == words)
