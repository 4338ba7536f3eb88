"""Entry of ``lynx``: one row per command, and one way for errors to leave.

A command is a module with ``configure(parser)`` and ``run(args) -> exit code``. It is imported only
when it is called, so that ``lynx plan`` loads no torch and ``lynx --help`` loads nothing at all.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from megatron_lynx import __version__
from megatron_lynx.cli.output import check_writable
from megatron_lynx.errors import ConfigError, LynxError

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("megatron_lynx.cli.plan", "plan a job: what to keep, what to rebuild and where"),
    "compare": ("megatron_lynx.cli.compare", "all methods side by side: time, memory, speedup"),
    "tune": ("megatron_lynx.cli.tune", "the best job for these devices, with lynx and without"),
    "explain": ("megatron_lynx.cli.explain", "what a plan drops, where it rebuilds it, where memory goes"),
    "simulate": ("megatron_lynx.cli.simulate", "run a plan's timeline; write a trace for Perfetto"),
    "report": ("megatron_lynx.cli.measured", "what a run did: planned beside measured"),
    "reproduce": ("megatron_lynx.cli.reproduce", "two papers' tables computed again: docs/reproduction.md"),
    "capture": (
        "megatron_lynx.cli.capture",
        "what a launch script would start, with stand-ins for launchers",
    ),
    "truth": ("megatron_lynx.cli.truth", "what GPUs measured beside what is predicted"),
    "doctor": ("megatron_lynx.cli.doctor", "what would go wrong with a job, before it is launched"),
    "run": ("megatron_lynx.cli.run", "an unmodified Megatron script, with --recompute-method lynx"),
    "patch": (
        "megatron_lynx.cli.patch",
        "teach a Megatron-LM checkout --recompute-method lynx, and take it back",
    ),
    "profile": ("megatron_lynx.cli.profile", "measure layer, ends and links on the ranks that will train"),
    "bench": ("megatron_lynx.cli.bench", "measured: Megatron's own recomputation and lynx, on a real link"),
    "args": ("megatron_lynx.cli.args", "the Megatron flags of a job, for launch scripts"),
}
"""Command name -> (module, one line of help)."""

PLANNING = frozenset({"plan", "compare", "tune", "explain", "simulate", "args", "doctor"})
"""Commands after which ``-- COMMAND`` is the command line of the job to plan."""

WRITTEN = ("output", "html", "trace", "docs", "json")
"""Flags whose value, where it is one, is a file that is written when all is done."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

_SIGNED = re.compile(r"-[0-9.].*")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with code 2."""
        message = message.removeprefix("argument ")
        if message.startswith("the following arguments are required"):
            message += f"; `{self.prog} --help` lists what works"
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message}\n")


class _Version(argparse.Action):
    """Looks for Megatron only when it is asked to."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print one line and exit."""
        from megatron_lynx.integration.versions import summary

        print(f"lynx {__version__}; {summary()}")
        parser.exit()


def build_parser(command: str | None = None) -> Parser:
    """The parser of ``lynx``; only the flags of ``command`` are filled in."""
    parser = Parser(prog="lynx", description="Plan activation recomputation for Megatron-Core.")
    parser.add_argument("--version", action=_Version, nargs=0, help="this version, and Megatron's")
    rows = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (module, text) in COMMANDS.items():
        row = rows.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == command:
            import_module(module).configure(row)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lynx`` on ``argv`` and return its exit code: 0, or 2 for what a user can mend."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), None)
    where = f"lynx {command}" if command in COMMANDS else "lynx"
    try:
        code = _run(words, command)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except LynxError as error:
        return _said(where, " ".join(str(error).split()))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has had enough; what Python still holds goes nowhere.
        _drop_output()
        return EXIT_INTERRUPTED
    except MemoryError:
        return _said(
            where, "this machine's memory does not suffice for a job of that size; a smaller one works"
        )
    except OSError as error:
        _drop_output()
        return _said(where, f"the output cannot be written: {error.strerror or error}")


def _run(words: list[str], command: str | None) -> int:
    """Parse and run; a command after ``--`` is the planned job's."""
    command_line = None
    if command in PLANNING and "--" in words:
        at = words.index("--")
        words, command_line = words[:at], words[at + 1 :]
    parser = build_parser(command)
    args, unknown = parser.parse_known_args(_joined(words) if command in PLANNING else words)
    args.command_line = command_line
    if args.command is None:
        parser.print_help()
        return EXIT_USER_ERROR
    where = f"lynx {args.command}"
    if unknown:
        parser.exit(
            EXIT_USER_ERROR,
            f"{where}: error: {unknown[0]} is not a flag of it; `{where} --help` lists what works\n",
        )
    if sys.stdout is None:
        raise ConfigError("standard output is closed; `> FILE` works")
    for flag in WRITTEN:
        if isinstance(path := getattr(args, flag, None), str | Path):
            check_writable(f"--{flag}", Path(path))
    module, _ = COMMANDS[args.command]
    code: int = import_module(module).run(args)
    return code


def _joined(words: Sequence[str]) -> list[str]:
    """``--budget -3GiB`` as ``--budget=-3GiB``: a value that begins with a sign is no flag."""
    found: list[str] = []
    for word in words:
        if _SIGNED.fullmatch(word) and found and found[-1].startswith("--") and "=" not in found[-1]:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _said(where: str, line: str) -> int:
    print(f"{where}: error: {line}", file=sys.stderr)
    return EXIT_USER_ERROR


def _drop_output() -> None:
    """Nothing more is written to standard output, not at exit either."""
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
