"""``lynx explain PLAN``: what a plan drops, where each piece is rebuilt, where memory goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from megatron_lynx.cli.job import add_job_flags, choices_from
from megatron_lynx.cli.report import Grid, console, job_line, layer_span, print_notes
from megatron_lynx.errors import ConfigError, InfeasibleError
from megatron_lynx.graph import LayerGraph
from megatron_lynx.job import Job
from megatron_lynx.plan import DEMAND, LayerPlan, Plan, StagePlan, Window, parse_plan
from megatron_lynx.search.given import graph_of, timeline_of
from megatron_lynx.search.workflow import check_plan
from megatron_lynx.simulator.memory import Peak, peak
from megatron_lynx.units import format_bytes, format_ns

SCHEMA = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file, as `lynx plan --output` writes it")
    add_job_flags(parser, plans=False)
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")


def read_plan(path: str, flag: str = "PLAN") -> Plan:
    """Read a plan file in either form; ``flag`` names it in errors.

    Raises:
        ConfigError: the file cannot be read.
        PlanError: it is not a plan.
    """
    try:
        return parse_plan(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} {path!r} cannot be read ({error}); `lynx plan --output plan.txt` writes one"
        ) from error


def run(args: argparse.Namespace) -> int:
    """Explain, with sizes and times if the flags of the job are given too."""
    plan = read_plan(args.plan)
    with_job = any((args.model, args.run, args.from_args, args.num_layers, args.command_line))
    job = None
    if with_job:
        if args.layout is None and plan.layout is not None:
            args.layout = plan.layout
        choices = choices_from(args)
        print_notes(choices.notes)
        job = choices.job
        check_plan(job, plan)
    if args.json:
        sys.stdout.write(_json(plan, job))
        return 0
    out = console()
    out.print(f"plan by {plan.planner}, layout {plan.layout or 'even'}, job {plan.fingerprint}", markup=False)
    if job is not None:
        out.print(job_line(job), markup=False)
    for stage in plan.stages:
        out.print(_stage(stage, graph_of(job, plan) if job else None, job))
    if job is not None:
        out.print(_memory(job, plan))
        check_fits(job, plan)
    else:
        out.print("With the flags of the job (--model ... or --from-args) also sizes, times and memory.")
    return 0


def check_fits(job: Job, plan: Plan) -> None:
    """Refuse a plan that was made for more memory than the job has.

    Raises:
        InfeasibleError: names the fullest stage and what it needs.
    """
    needed = {
        stage.stage: job.footprint(stage.stage, len(stage.layers)).static_bytes + top.size_bytes
        for stage, top in _peaks(job, plan)
    }
    stage = max(needed, key=lambda rank: needed[rank])
    if needed[stage] > job.memory_bytes:
        raise InfeasibleError(
            f"the plan needs {format_bytes(needed[stage])} on stage {stage}, but a device offers "
            f"{format_bytes(job.memory_bytes)}; the --cluster or --budget that it was made for works",
            stage=stage,
            budget_bytes=job.memory_bytes,
            needed_bytes=needed[stage],
        )


def groups(stage: StagePlan) -> list[tuple[list[int], LayerPlan]]:
    """Layers of a stage that are treated alike, in the order of the first of each group.

    Alike means the same choices, windows taken relative to the layer.
    """
    found: dict[tuple[tuple[str, str], ...], tuple[list[int], LayerPlan]] = {}
    for plan in stage.layers:
        key = tuple((region, relative(choice, plan.layer)) for region, choice in plan.choices)
        found.setdefault(key, ([], plan))[0].append(plan.layer)
    return list(found.values())


def relative(choice: Window | str, layer: int) -> str:
    """A choice in words, its layer relative to the one it is for."""
    if not isinstance(choice, Window):
        return "on demand" if choice == DEMAND else choice
    if choice.layer < 0:
        return {"head": "while the output layer waits", "stall": "while waiting for the gradient"}[
            choice.kind
        ]
    pass_name = "forward" if choice.kind == "fwd" else "backward"
    offset = choice.layer - layer
    whose = "this layer" if offset == 0 else f"{abs(offset)} layer{'s' * (abs(offset) > 1)} "
    whose += "" if offset == 0 else "later" if offset > 0 else "earlier"
    return f"{pass_name} of {choice.slot}, {whose}"


def _stage(stage: StagePlan, graph: LayerGraph | None, job: Job | None) -> RenderableType:
    if not stage.layers:
        return Text(f"stage {stage.stage}: no layers")
    blocks: list[RenderableType] = []
    for layers, plan in groups(stage):
        title = f"stage {stage.stage}, layers {layer_span(layers)}"
        if not plan.choices:
            blocks.append(Text(f"{title}: everything is kept", style="dim"))
            continue
        table = Grid(title, left=2)
        table.add_column("dropped", "rebuilt in")
        if graph is not None and job is not None:
            table.add_column("bytes a layer", "time")
        for region, choice in plan.choices:
            cells = [region, relative(choice, plan.layer)]
            if graph is not None and job is not None:
                cells.append(format_bytes(graph.rebuilt_bytes(region, plan.dropped)))
                cells.append(format_ns(job.costs.layer.rebuild_ns(region, hidden=choice != DEMAND)))
            table.add_row(*cells)
        blocks.append(table)
    return Group(*blocks)


def _peaks(job: Job, plan: Plan) -> Iterable[tuple[StagePlan, Peak]]:
    timeline = timeline_of(job, plan)
    return [(stage, peak(timeline, stage.stage)) for stage in plan.stages]


def _memory(job: Job, plan: Plan) -> Grid:
    """Static memory by owner, then the activations at the simulated peak by owner."""
    found = list(_peaks(job, plan))
    table = Grid("memory of each stage at its peak")
    table.add_column("owner")
    for stage, _ in found:
        table.add_column(f"stage {stage.stage}")
    static = [job.footprint(stage.stage, len(stage.layers)) for stage, _ in found]
    for owner, _ in static[0].owners():
        sizes = [dict(f.owners())[owner] for f in static]
        if any(sizes):
            table.add_row(owner, *map(format_bytes, sizes))
    owners = dict.fromkeys(owner for _, top in found for owner, _ in top.owners)
    for owner in owners:
        table.add_row(owner, *(format_bytes(dict(top.owners).get(owner, 0)) for _, top in found))
    totals = [f.static_bytes + top.size_bytes for f, (_, top) in zip(static, found, strict=True)]
    table.add_row("peak", *map(format_bytes, totals))
    table.add_row("free", *(format_bytes(job.memory_bytes - total) for total in totals))
    table.add_row("at", *(_moment(top) for _, top in found))
    return table


def _moment(top: Peak) -> str:
    where = f"layer {top.layer} {top.region}".strip() if top.layer >= 0 else top.region
    return f"{top.action or ''} {where}".strip()


def _json(plan: Plan, job: Job | None) -> str:
    whole = json.loads(plan.to_json())
    for entry, stage in zip(whole["stages"], plan.stages, strict=True):
        entry["groups"] = [
            {
                "layers": layers,
                "dropped": {region: relative(choice, one.layer) for region, choice in one.choices},
            }
            for layers, one in groups(stage)
        ]
    if job is not None:
        for entry, (stage, top) in zip(whole["stages"], _peaks(job, plan), strict=True):
            static = job.footprint(stage.stage, len(stage.layers))
            entry["static"] = dict(static.owners())
            entry["peak"] = {"size_bytes": top.size_bytes, "at_ns": top.at_ns, "owners": dict(top.owners)}
    return json.dumps({**whole, "schema": SCHEMA}, indent=1) + "\n"
