"""``lynx doctor``: what would go wrong with a job, before it is launched.

    lynx doctor train.sh                    # a launch script, a list of arguments, what `lynx capture` wrote
    lynx doctor -- torchrun --nproc-per-node 8 pretrain_gpt.py ARGS
    lynx doctor -- ARGS                     # Megatron's arguments alone

Run it where the ranks will run, in the same environment. One line a finding, with what to do; exit code 1
where the job would fail, 0 where there are warnings at most.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_lynx.cli.health import files, places, sizes, software
from megatron_lynx.cli.health.facts import Check, Facts, Finding, fail, warn
from megatron_lynx.cli.health.machine import Machine, this_machine
from megatron_lynx.cli.health.plans import Plans
from megatron_lynx.cli.launch.capturing import Launch
from megatron_lynx.cli.launch.sources import Source, from_command, from_file
from megatron_lynx.cli.launch.words import split, world_size
from megatron_lynx.cli.megatron_args import flags_of
from megatron_lynx.errors import ConfigError, LynxError

CHECKS: tuple[Check, ...] = (*software.CHECKS, *sizes.CHECKS, *files.CHECKS, *places.CHECKS)

EXIT_WOULD_FAIL = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a launch script or a list of arguments")
    parser.add_argument("--launch", type=int, metavar="N", help="which of a script's trainings")


def run(args: argparse.Namespace) -> int:
    """Look, print, and say whether the job would fail."""
    findings = examine(args.script, args.command_line, this_machine(), args.launch)
    for finding in findings:
        line = " ".join(finding.text.split())
        print(f"{finding.level}: {line}")
    failing = sum(finding.level == "fail" for finding in findings)
    print(f"lynx doctor: {failing} would fail, {len(findings) - failing} warnings", file=sys.stderr)
    return EXIT_WOULD_FAIL if failing else 0


Ask = Callable[[Sequence[str]], str | None]
"""What Megatron's parser says of a command line; None where it says nothing."""


def _ask_megatron(words: Sequence[str]) -> str | None:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")  # of what Megatron does not find; the checks above name it
        from megatron_lynx.integration.parsing import parser_complaint
    return parser_complaint(words)


def examine(
    script: str | None,
    command: Sequence[str] | None,
    machine: Machine,
    number: int | None = None,
    ask: Ask = _ask_megatron,
) -> list[Finding]:
    """Everything that is found in a job, given as a file or as words.

    Raises:
        ConfigError: there is no job to look at.
    """
    if (script is None) == (command is None):
        raise ConfigError("SCRIPT or -- COMMAND is needed; `lynx doctor train.sh` works")
    source = _source(script, command or (), number)
    launch = source.launch
    launcher, words = split(launch.argv)
    flags = flags_of(words)
    ranks, _ = world_size(launch)
    environment = {**os.environ, **launch.environment}
    facts = Facts(
        flags=flags,
        environment=environment,
        machine=machine,
        world_size=ranks,
        ranks_per_node=_per_node(launch),
        folder=Path(launch.folder or "."),
        script=_script(launcher),
    )
    checks: tuple[Check, ...] = (*CHECKS, Plans(tuple(launch.argv) if script is None else (), script))
    found = [finding for check in checks for finding in check(facts)]
    return found + list(_parsed(words, facts, ask))


def _source(script: str | None, command: Sequence[str], number: int | None) -> Source:
    if script is not None:
        return from_file(script, number, lambda _: True)
    if command and command[0].startswith("--"):
        return Source(launch=Launch(argv=tuple(command), environment=dict(os.environ)))
    return from_command(command, number)


def _script(launcher: Sequence[str]) -> str | None:
    """The name of the script or module that trains, of a launcher's words."""
    last = launcher[-1] if launcher else ""
    return Path(last).name if last.endswith(".py") or "-m" in launcher[-2:] else None


def _per_node(launch: Launch) -> int | None:
    """Ranks that the launcher starts on a node, where it says so in a number."""
    launcher, _ = split(launch.argv)
    given = flags_of(launcher)
    for name in ("nproc-per-node", "nproc_per_node"):
        word = (given.get(name) or [""])[0]
        if word.isdigit():
            return int(word)
    return None


def _parsed(words: Sequence[str], facts: Facts, ask: Ask) -> Iterator[Finding]:
    """What Megatron's parser says, and lynx's own refusals, where there is a Megatron to ask."""
    if facts.machine.torch is None or facts.machine.megatron is None or facts.machine.megatron_error:
        return
    try:
        complaint = ask(words)
    except LynxError as error:
        yield fail(str(error))
        return
    except Exception as error:  # whatever a broken installation raises
        yield fail(f"importing Megatron fails: {type(error).__name__}: {error}")
        return
    if complaint is None:
        return
    if not facts.gpt and "unrecognized arguments" in complaint:
        yield warn(f"{complaint}; {facts.script} may know them")
    else:
        yield fail(complaint)
