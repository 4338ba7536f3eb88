"""``lynx capture -- bash train.sh ARGS``: what a launch script would start.

Bash runs the user's own script with stand-ins for ``torchrun``, ``srun``, ``python pretrain_*.py`` and
other launchers first on PATH. They start nothing and record what they were asked to start. The rest of
the script does run; with ``--dry`` it does not (nothing is written, see ``launch.capturing``), and a
script that does more than that is refused.
"""

from __future__ import annotations

import argparse
import sys

from megatron_lynx.cli.launch.capturing import QUIET, Captured, Launch, capture
from megatron_lynx.cli.launch.sources import Source, is_training
from megatron_lynx.cli.megatron_args import parse_source
from megatron_lynx.cli.output import write_text
from megatron_lynx.cli.sizes import summary
from megatron_lynx.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--dry", action="store_true", help="run nothing but bash; refuse scripts that write")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the launches there, for --from-args")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="bash train.sh ARGS")


def run(args: argparse.Namespace) -> int:
    """Capture; one line of JSON for each launch on standard output, a summary on standard error."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise ConfigError("-- is followed by no command; `lynx capture -- bash train.sh` works")
    if not args.dry:
        _say("launchers are replaced and start nothing; the rest of the script does run")
    found = capture(words, restricted=args.dry)
    if args.dry:
        _refuse(found)
    for note in found.notes():
        _say(note)
    if not found.launches:
        raise ConfigError(
            f"the script started nothing (it ended with code {found.code}"
            + (f"; its last words: {found.last_words[:200]})" if found.last_words else ")")
            + "; a script that calls torchrun, srun or python pretrain_gpt.py does"
        )
    for number, launch in enumerate(found.launches, 1):
        _say(f"{number}: {_describe(launch, found)}")
    lines = "".join(f"{launch.to_json()}\n" for launch in found.launches)
    if args.output:
        write_text(lines, args.output, "--output", "launches.jsonl")
        _say(f"written to {args.output}: `lynx compare --from-args {args.output}` plans it")
    else:
        sys.stdout.write(lines)
    return 0


def _say(line: str) -> None:
    print(f"lynx capture: {line}", file=sys.stderr)


def _refuse(found: Captured) -> None:
    """What ``--dry`` promises.

    Raises:
        ConfigError: the script asked for more than computing and reading.
    """
    effects = [name for name in found.skipped if name not in ("clear", "sleep", "sync", "wait", "tee")]
    if effects or found.writes:
        named = [*effects, *(f"writing {path}" for path in found.writes)]
        known = "side effects" if all(name in QUIET for name in effects) else "other programs"
        raise ConfigError(
            f"--dry: the script has {known}: {', '.join(named)}; without --dry they are run, and "
            "`lynx compare --from-args SCRIPT` passes over them"
        )


def _describe(launch: Launch, found: Captured) -> str:
    """One line about a launch."""
    shown = " ".join(launch.argv[:4])
    if not is_training(launch):
        return f"{shown} ... (trains nothing)"
    try:
        read = parse_source(Source(launch=launch, unset=found.unset))
    except ConfigError as error:
        return f"{shown} ...: {error}"
    sizes = ", ".join(f"{name} {value}" for name, value in summary(read).items())
    return f"{shown} ...: {sizes}" + "".join(f"; {reason}" for reason in read.refused)
