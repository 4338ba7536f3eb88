"""Entry of ``lynx``: one row per command, and one way for errors to leave.

A command is a module with ``configure(parser)`` and ``run(args) -> exit code``. It is imported only
when it is called, so that ``lynx plan`` loads no torch and ``lynx --help`` loads nothing at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from megatron_lynx import __version__
from megatron_lynx.errors import LynxError

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("megatron_lynx.cli.plan", "plan a job: what to keep, what to rebuild and where"),
    "compare": ("megatron_lynx.cli.compare", "all methods side by side: time, memory, speedup"),
    "explain": ("megatron_lynx.cli.explain", "what a plan drops, where it rebuilds it, where memory goes"),
    "simulate": ("megatron_lynx.cli.simulate", "run a plan's timeline; write a trace for Perfetto"),
    "report": ("megatron_lynx.cli.measured", "what a run did: planned beside measured"),
    "reproduce": ("megatron_lynx.cli.reproduce", "two papers' tables computed again: docs/reproduction.md"),
    "capture": (
        "megatron_lynx.cli.capture",
        "what a launch script would start, with stand-ins for launchers",
    ),
    "truth": ("megatron_lynx.cli.truth", "what GPUs measured beside what is predicted"),
    "run": ("megatron_lynx.cli.run", "an unmodified Megatron script, with --recompute-method lynx"),
    "profile": ("megatron_lynx.cli.profile", "measure layer, ends and links on the ranks that will train"),
    "bench": ("megatron_lynx.cli.bench", "measured: Megatron's own recomputation and lynx, on a real link"),
    "args": ("megatron_lynx.cli.args", "the Megatron flags of a job, for launch scripts"),
}
"""Command name -> (module, one line of help)."""

PLANNING = frozenset({"plan", "compare", "explain", "simulate", "args"})
"""Commands after which ``-- COMMAND`` is the command line of the job to plan."""

EXIT_USER_ERROR = 2


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with code 2."""
        message = message.removeprefix("argument ")
        if message.startswith("the following arguments are required"):
            message += f"; `{self.prog} --help` lists what works"
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message}\n")


def build_parser(command: str | None = None) -> Parser:
    """The parser of ``lynx``; only the flags of ``command`` are filled in."""
    parser = Parser(prog="lynx", description="Plan activation recomputation for Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"lynx {__version__}")
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
    parser = build_parser(command)
    command_line = None
    if command in PLANNING and "--" in words:
        at = words.index("--")
        words, command_line = words[:at], words[at + 1 :]
    try:
        args, unknown = parser.parse_known_args(words)
        args.command_line = command_line
        if args.command is None:
            parser.print_help()
            return EXIT_USER_ERROR
        if unknown:
            where = f"lynx {args.command}"
            parser.exit(
                EXIT_USER_ERROR,
                f"{where}: error: {unknown[0]} is not a flag of it; `{where} --help` lists what works\n",
            )
        module, _ = COMMANDS[args.command]
        code: int = import_module(module).run(args)
        return code
    except LynxError as error:
        line = " ".join(str(error).split())
        print(f"lynx {command}: error: {line}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 130
