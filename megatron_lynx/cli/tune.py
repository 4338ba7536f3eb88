"""``lynx tune``: the best job for so many devices, with lynx and with Megatron's own options.

lynx tune --model gpt-7b --cluster a100-40g-pcie --devices 64 --seq-length 2048 --global-batch-size 512
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.status import Status
from rich.table import Table

from megatron_lynx.cli.args import megatron_flags
from megatron_lynx.cli.job import add_job_flags, read_profile, values_from, whole
from megatron_lynx.cli.memory_flags import optimizer_from
from megatron_lynx.cli.output import write_text
from megatron_lynx.cli.plan import write_plan
from megatron_lynx.cli.report import console, print_notes, progress
from megatron_lynx.cli.tune_docs import EACH_S, write_tuned
from megatron_lynx.cli.tune_page import tune_page
from megatron_lynx.errors import ConfigError
from megatron_lynx.job import make_job
from megatron_lynx.planner.baselines import modules_of
from megatron_lynx.presets import load_cluster
from megatron_lynx.search.found import WITH, WITHOUT, Found, Tuned, tokens_per_device, tuned_json
from megatron_lynx.search.space import SIZES, Question
from megatron_lynx.search.tune import QUICK_S, SIDES, TIME_LIMIT_S, Limits, tune
from megatron_lynx.units import format_bytes, format_ns, parse_bytes, parse_ns

NAMES = {WITHOUT: "Megatron's own options", WITH: "with lynx"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_job_flags(parser, plans=False)
    group = parser.add_argument_group(
        "search", "sizes that are given (--tp, --pp, --vpp, --dp, --micro-batch-size, ...) stay as they are"
    )
    group.add_argument("--devices", type=whole, metavar="N", help="devices in all")
    group.add_argument("--fixed", metavar="LIST", help=f"sizes that stay: tp=8,pp=4; of {', '.join(SIZES)}")
    group.add_argument("--max-tp", type=whole, metavar="N", help="largest tensor-parallel size")
    group.add_argument("--methods", choices=tuple(SIDES), default="both", help="default: both")
    group.add_argument("--top", type=whole, default=10, metavar="N", help="entries of each side; default: 10")
    group.add_argument(
        "--quick", action="store_true", help="move layers and plan exactly for the first few alone"
    )
    group.add_argument("--jobs", type=whole, metavar="N", help="processes; default: one a core")
    parser.add_argument("--docs", metavar="FILE", help="write the section of all presets into a document")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page: step against peak")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the chosen entry's plan")
    parser.add_argument("--choose", type=whole, default=1, metavar="N", help="which entry; default: 1")


def run(args: argparse.Namespace) -> int:
    """Search, print, write."""
    if args.docs:
        limit_s = _limit_s(args) if args.time_limit else EACH_S
        write_tuned(args.docs, args.jobs or os.cpu_count() or 1, limit_s)
        return 0
    questions, notes = _questions(args)
    print_notes(notes)
    limits = Limits(
        top=args.top,
        quick=args.quick,
        jobs=args.jobs or os.cpu_count() or 1,
        time_limit_s=_limit_s(args) / len(questions),
    )
    tuned = [_search(question, args.methods, limits) for question in questions]
    if args.html:
        write_text(tune_page(tuned), args.html, "--html", "tune.html")
    if args.json:
        sys.stdout.write(_json(tuned, args.top))
        return 0
    for one in tuned:
        _print(one, args.top)
        if one.stopped == "interrupted":
            break
    if len(tuned) > 1:
        console().print(_sweep(tuned))
    if args.html:
        console().print(f"page written to {args.html}", markup=False)
    _print_choice(tuned[0], args)
    return 0


def _limit_s(args: argparse.Namespace) -> float:
    if args.time_limit:
        return parse_ns(args.time_limit, "--time-limit") / 1e9
    return QUICK_S if args.quick else TIME_LIMIT_S


def _search(question: Question, methods: str, limits: Limits) -> Tuned:
    last = time.monotonic()
    with progress("tuning") as status:

        def tell(text: str, tuned: Tuned) -> None:
            nonlocal last
            if time.monotonic() - last > 0.2:
                last = time.monotonic()
                _tell(status, text, tuned)

        return tune(question, methods, limits, tell)


def _tell(status: Status, text: str, tuned: Tuned) -> None:
    best = ", ".join(
        f"{NAMES[side]} {format_ns(one.iteration_ns)}"
        for side in (WITH, WITHOUT)
        if (one := tuned.best(side))
    )
    status.update(f"{text}; best so far: {best or 'none yet'}")


# What is asked for


def _questions(args: argparse.Namespace) -> tuple[list[Question], list[str]]:
    """The question, once for each budget.

    Raises:
        ConfigError: names the flag, its value and a value that works.
    """
    values, model, script, notes = values_from(args)
    given = {name: value for name, value in vars(args).items() if value is not None}
    devices: int = given.get("devices") or (script.world_size if script else None) or 0
    for flag, value in (
        ("--devices", devices),
        ("--seq-length", values.get("seq_length")),
        ("--global-batch-size", values.get("global_batch_size")),
    ):
        if not value:
            raise ConfigError(f"{flag} is missing; {flag} {_EXAMPLE[flag]} works")
    profiles = [read_profile(path) for path in str(values.get("profile", "")).split(",") if path]
    budgets = [text for text in str(values.get("budget") or "").split(",") if text]
    question = Question(
        model=model,
        cluster=load_cluster(values["cluster"]),
        devices=devices,
        seq_length=values["seq_length"],
        global_batch_size=values["global_batch_size"],
        max_tp=args.max_tp,
        fixed={**_given(given), **_fixed(args.fixed)},
        profiles=tuple(profiles),
        optimizer=optimizer_from(values),
    )
    sizes = [parse_bytes(text, "--budget") for text in budgets]
    return [replace(question, memory_bytes=size) for size in sizes] or [question], notes


_EXAMPLE = {"--devices": 64, "--seq-length": 2048, "--global-batch-size": 512}


def _given(given: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that have flags of their own."""
    names = {name: name for name in SIZES} | {"distributed_optimizer": "use_distributed_optimizer"}
    return {name: int(given[flag]) for name, flag in names.items() if flag in given}


def _fixed(text: str | None) -> dict[str, int]:
    """``tp=8,pp=4`` as sizes by name.

    Raises:
        ConfigError: no size of that name, or no number.
    """
    found = {}
    for word in filter(None, (text or "").split(",")):
        name, _, value = word.partition("=")
        name = _SHORT.get(name, name.replace("-", "_"))
        if name not in SIZES or not value.isdigit():
            raise ConfigError(f"--fixed {word!r} is no size; of {', '.join(SIZES)}, tp=8 works")
        found[name] = int(value)
    return found


_SHORT = {"sp": "sequence_parallel", "do": "distributed_optimizer", "mbs": "micro_batch_size"}


# What is found


def _print(tuned: Tuned, top: int) -> None:
    out, question = console(), tuned.question
    budget = question.memory_bytes or question.cluster.budget_bytes
    out.print(
        f"{question.model.name} on {question.devices} devices of {question.cluster.name}, sequence "
        f"{question.seq_length}, global batch {question.global_batch_size}, {format_bytes(budget)} a device",
        markup=False,
    )
    for side in (WITHOUT, WITH):
        if tuned.tallies[side].configurations:
            out.print(_table(tuned, side, top))
            out.print(f"{NAMES[side]}: {tuned.tallies[side]}", markup=False, soft_wrap=True)
    if tuned.stopped:
        out.print(f"stopped: {tuned.stopped}; what was found until then stands above", markup=False)
    if tuned.gain is not None:
        out.print(f"best with lynx over best without, both tuned: {tuned.gain:.3f}x", markup=False)
    if tuned.shifts:
        out.print(_shifts(tuned))


def _table(tuned: Tuned, side: str, top: int) -> Table:
    table = Table(title=f"{NAMES[side]}: the first {top}", caption="simulated; no GPU has run any of these")
    table.add_column("", justify="right")
    table.add_column("configuration")
    for name in ("step", "tokens/s/GPU", "MFU", "peak", "stage"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("method")
    table.add_column("costs")
    table.add_column("recomputed, in layers", overflow="fold")
    for number, one in enumerate(tuned.found[side][:top], start=1):
        stage, peak = one.fullest
        table.add_row(
            str(number),
            str(one.config),
            format_ns(one.iteration_ns),
            f"{tokens_per_device(tuned.question, one.iteration_ns):,.0f}",
            f"{one.row.mfu or 0:.1%}",
            format_bytes(peak),
            str(stage),
            one.row.method + (", exact" if one.exact else ""),
            one.costs,
            one.recomputed,
        )
    return table


def _shifts(tuned: Tuned) -> Table:
    table = Table(title="when a figure of the cluster is off, plans as they are")
    table.add_column("configuration")
    entries = [one for one in tuned.found[WITH] if one.config in tuned.shifts]
    names = [shift.name for shift in tuned.shifts[entries[0].config]]
    for name in ("step", *names):
        table.add_column(name, justify="right")
    for one in entries:
        steps = [shift.iteration_ns for shift in tuned.shifts[one.config]]
        table.add_row(str(one.config), *map(format_ns, (one.iteration_ns, *steps)))
    return table


def _sweep(tuned: list[Tuned]) -> Table:
    table = Table(title="the best by memory of a device")
    for name in ("budget", "with lynx", "step", "Megatron's own", "step", "gain"):
        table.add_column(name)
    for one in tuned:
        cells = [format_bytes(one.question.memory_bytes or 0)]
        for side in (WITH, WITHOUT):
            best = one.best(side)
            cells += (
                [f"{best.config} {best.row.method}", format_ns(best.iteration_ns)] if best else ["-", "-"]
            )
        table.add_row(*cells, f"{one.gain:.3f}x" if one.gain else "-")
    return table


def _json(tuned: list[Tuned], top: int) -> str:
    parts = [json.loads(tuned_json(one, top)) for one in tuned]
    return json.dumps(parts[0] if len(parts) == 1 else {"schema": 1, "budgets": parts}, indent=1) + "\n"


# The chosen entry


@dataclass(frozen=True, slots=True)
class Launch:
    """How to run an entry: ``words`` of a command line; ``needs_plan`` says that it reads a plan file."""

    words: tuple[str, ...]
    needs_plan: bool


def launch_of(question: Question, entry: Found, plan_file: str = "plan.txt") -> Launch:
    """The command that trains an entry, data and tokenizer left to the user.

    An entry of Megatron's own options, and one that recomputes nothing, needs no plan.
    """
    nodes = -(-question.devices // question.cluster.gpus_per_node)
    each = min(question.devices, question.cluster.gpus_per_node)
    job = make_job(
        question.model,
        entry.config.parallel,
        question.batch(entry.config),
        cluster=question.cluster,
        memory_bytes=question.memory_bytes,
        optimizer=question.optimizer_of(entry.config),
        layout=entry.plan.layout,
        check_split=False,
    )
    words = ["torchrun", "--nproc-per-node", str(each)]
    words += ["--nnodes", str(nodes)] if nodes > 1 else []
    words += ["-m", "megatron_lynx.pretrain_gpt", *megatron_flags(job)]
    needs_plan = entry.side == WITH and not entry.keeps_all
    words += (
        ["--recompute-method", "lynx", "--lynx-plan", plan_file] if needs_plan else recompute_flags(entry)
    )
    return Launch(tuple(words), needs_plan)


def recompute_flags(entry: Found) -> list[str]:
    """Megatron's own flags for an entry's method."""
    name, _, number = entry.plan.planner.rpartition("-")
    if entry.keeps_all:
        return []
    if name in ("full-uniform", "full-block"):
        method = name.removeprefix("full-")
        return [
            *("--recompute-granularity", "full", "--recompute-method", method),
            *("--recompute-num-layers", number),
        ]
    return ["--recompute-granularity", "selective", "--recompute-modules", *modules_of(entry.plan.planner)]


def _print_choice(tuned: Tuned, args: argparse.Namespace) -> None:
    """Write the plan of the chosen entry and print its command.

    Raises:
        ConfigError: there is no such entry, or the file cannot be written.
    """
    side = WITH if tuned.found[WITH] else WITHOUT
    entries = tuned.found[side]
    if not entries:
        print_notes(["no configuration fits; a larger --budget or more --devices would"])
        return
    if not 1 <= args.choose <= len(entries):
        raise ConfigError(f"--choose {args.choose} is not one of {len(entries)} entries; --choose 1 works")
    entry = entries[args.choose - 1]
    launch = launch_of(tuned.question, entry, args.output or "plan.txt")
    out = console()
    if args.output:
        write_plan(entry.plan, args.output)
        out.print(f"plan of entry {args.choose} written to {args.output}", markup=False)
    elif launch.needs_plan:
        out.print("--output plan.txt writes the plan that this command reads", markup=False)
    print(shlex.join(launch.words))
