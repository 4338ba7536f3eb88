"""Lets bash run a launch script with stand-ins for launchers, and reads what they recorded.

*Free* capture (``lynx capture``): only launchers are stood in for; the rest of the script does run.
*Restricted* capture (``--from-args``): the script can write nowhere (Landlock), and runs nothing but bash,
stand-ins and the programs in ``HARMLESS``, which only read. What it asks for beyond that is not run, and
is named; where its output is read, that is ``LYNX_UNKNOWN``, which no flag of a plan accepts.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lynx.cli.launch import restrict, stand_in
from megatron_lynx.errors import ConfigError

_HARMLESS = """
awk basename bash bc cat comm cut date dirname egrep env expr fgrep find gawk getopt grep head hostname id ls
mawk mktemp nproc numfmt paste printenv readlink realpath rev sed seq shuf sort tac tail test tr uname uniq
wc whoami xargs
"""
HARMLESS = tuple(_HARMLESS.split())
"""Programs that a restricted capture runs: they compute and read."""

QUIET = (
    *("chmod", "clear", "cp", "ln", "mkdir", "mv", "rm", "rmdir", "rsync", "sleep", "sync", "tee"),
    *("touch", "wait"),
)
"""Programs that a restricted capture passes over as if they had succeeded."""

SH = "/bin/sh"
"""What runs a stand-in: not bash, which would read the guard each time."""

TIME_LIMIT_S = 240
"""What a restricted capture may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a stand-in was asked to start.

    ``argv`` is the command line, its launcher first. ``within`` are the wrappers around it, outermost
    first, each with its own options. ``environment`` holds the variables that matter.
    """

    argv: tuple[str, ...]
    within: tuple[tuple[str, ...], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""

    def to_json(self) -> str:
        """One line, whatever bytes the words hold."""
        return json.dumps(
            {
                "argv": self.argv,
                "within": self.within,
                "environment": dict(self.environment),
                "folder": self.folder,
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launch:
        """Read back what ``to_json`` writes.

        Raises:
            ConfigError: it is no such object.
        """
        argv, within = data.get("argv"), data.get("within", [])
        if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
            raise ConfigError('a launch needs "argv", a list of words; `lynx capture` writes one a line')
        return cls(
            argv=tuple(argv),
            within=tuple(tuple(words) for words in within),
            environment=dict(data.get("environment", {})),
            folder=str(data.get("folder", "")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a script started: ``launches`` in order.

    ``skipped`` are programs that were not run, ``missing`` folders and files that are not here, ``unset``
    variables that were used without a value, ``writes`` commands whose output went to a file and was left
    out; ``code`` and ``last_words`` are how the script ended.
    """

    launches: tuple[Launch, ...]
    skipped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    code: int = 0
    last_words: str = ""

    def notes(self) -> list[str]:
        """Lines that say what was not run."""
        found = []
        if self.skipped:
            found.append("the script was read, not run; passed over: " + ", ".join(self.skipped))
        if self.missing:
            found.append("not on this machine, passed over: " + ", ".join(self.missing))
        return found


def capture(
    command: Sequence[str], *, restricted: bool, environment: Mapping[str, str] | None = None
) -> Captured:
    """Run ``command`` with stand-ins for launchers.

    Raises:
        ConfigError: there is no bash, no Landlock (restricted), or the script does not end.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("bash is not on PATH, and only bash reads launch scripts; `-- torchrun ...` works")
    with tempfile.TemporaryDirectory(prefix="lynx-") as name:
        folder = Path(name).resolve()
        _fill(folder, restricted)
        own = _environment(folder, environment or os.environ, restricted)
        words = _shebang(_job(command, own), bash)
        if restricted:
            python = sys.executable
            programs = [bash, SH, python, *filter(None, map(shutil.which, HARMLESS)), str(folder)]
            words = [python, "-ISs", restrict.__file__, str(folder), ":".join(programs), *words]
        code, last = _run(words, own, folder, restricted)
        if restricted and code == restrict.NO_LANDLOCK and not (folder / "launches").exists():
            raise ConfigError(
                "--from-args: a script is read by bash, kept from writing by Landlock, which this system "
                f"does not have; `lynx capture -- {shlex.join(command)}` runs it with stand-ins"
            )
        return _read(folder, code, last)


def _fill(folder: Path, restricted: bool) -> None:
    """The stand-ins, as small shell scripts in ``folder/bin``, and links to what may run."""
    own = folder / "bin"
    own.mkdir()
    interpreter = shlex.join([sys.executable, "-ISs", stand_in.__file__])
    texts = {name: f'exec {interpreter} {name} "$@"' for name in (*stand_in.STAND_INS, ".plain", ".unknown")}
    if restricted:
        for program in HARMLESS:
            found = shutil.which(program)
            if found:
                (own / program).symlink_to(found)
        noted = "printf '%s\\n' '[\"{name}\"]' >>\"$LYNX_CAPTURE/skipped\""
        texts |= {name: noted.replace("{name}", name) for name in QUIET} | {"tee": "exec cat"}
    for name, text in texts.items():
        (own / name).write_text(f"#!{SH}\n{text}\n", "utf-8")
        (own / name).chmod(0o755)


def _environment(folder: Path, given: Mapping[str, str], restricted: bool) -> dict[str, str]:
    own = str(folder / "bin")
    return {
        **given,
        "PATH": own if restricted else f"{own}:{given.get('PATH', '')}",
        "LYNX_PATH": own,
        "LYNX_CAPTURE": str(folder),
        "LYNX_RESTRICTED": "1" if restricted else "0",
        "BASH_ENV": str(Path(stand_in.__file__).with_name("guard.sh")),
        **({"TMPDIR": str(folder)} if restricted else {}),
    }


def _job(command: Sequence[str], environment: dict[str, str]) -> list[str]:
    """The command, its script's ``#SBATCH`` lines taken into the environment where SLURM has not been."""
    words = list(command)
    at = next((i for i, word in enumerate(words) if os.path.isfile(word)), None)
    if at is not None and words[0] != "sbatch" and "SLURM_JOB_ID" not in environment:
        options = stand_in.slurm_options(stand_in.sbatch_lines(_text(words[at])))
        if options:
            environment.update({**stand_in.JOB, **stand_in.slurm_environment(options)})
            environment["SLURM_SUBMIT_DIR"] = os.getcwd()
    return words


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a launch script that can be read works") from error


def _shebang(words: Sequence[str], bash: str) -> list[str]:
    """``words`` with a program that can be executed in front: bash for a script given alone."""
    if words[0] in ("bash", "sh") or os.path.basename(words[0]) == "bash":
        return [bash, *words[1:]]
    if os.path.isfile(words[0]) and not os.access(words[0], os.X_OK):
        return [bash, *words]
    return [bash, "-c", '"$@"', "lynx", *words]


def _run(
    words: Sequence[str], environment: dict[str, str], folder: Path, restricted: bool
) -> tuple[int, str]:
    """Exit code and the last lines of what a command printed, which goes to standard error."""
    out = folder / "output"
    with out.open("wb") as file:
        here = os.fstat(file.fileno())
        environment["LYNX_STDOUT"] = f"{here.st_dev}:{here.st_ino}"
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(TIME_LIMIT_S if restricted else None)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"the script did not end within {TIME_LIMIT_S} s; `lynx capture` has no limit"
            ) from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = out.read_text("utf-8", errors="replace")
    if not restricted:
        sys.stderr.write(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return code, lines[-1] if lines else ""


def _read(folder: Path, code: int, last: str) -> Captured:
    def lines(name: str) -> list[str]:
        path = folder / name
        return list(dict.fromkeys(path.read_text("utf-8").splitlines())) if path.exists() else []

    launches = folder / "launches"
    records = launches.read_text("utf-8").splitlines() if launches.exists() else []
    skipped = [json.loads(line)[:2] for line in lines("skipped")]
    return Captured(
        launches=tuple(Launch.from_json(json.loads(line)) for line in records),
        skipped=tuple(dict.fromkeys(words[0] for words in skipped)),
        missing=tuple(lines("missing")),
        unset=tuple(lines("unset")),
        writes=tuple(line[:60] for line in lines("writes")),
        code=code,
        last_words=last.replace(str(folder), "lynx"),
    )
