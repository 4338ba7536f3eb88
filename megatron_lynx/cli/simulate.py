"""``lynx simulate``: the timeline of a plan, stage by stage; a trace for Perfetto."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from megatron_lynx.cli.explain import check_fits, read_plan
from megatron_lynx.cli.html import plan_page, write_page
from megatron_lynx.cli.job import Choices, add_job_flags, choices_from, planned_by
from megatron_lynx.cli.output import write_text
from megatron_lynx.cli.report import Grid, console, job_line, print_notes, progress
from megatron_lynx.job import Job
from megatron_lynx.plan import Plan
from megatron_lynx.search.given import timeline_of
from megatron_lynx.search.rows import job_facts
from megatron_lynx.search.workflow import part_of
from megatron_lynx.simulator import passes as kinds
from megatron_lynx.simulator.memory import peak
from megatron_lynx.simulator.timeline import Timeline
from megatron_lynx.simulator.trace import to_json
from megatron_lynx.units import format_bytes, format_ns

SCHEMA = 1
_COLUMNS = {
    "forward": kinds.FORWARD,
    "backward": kinds.BACKWARD,
    "rebuilt in windows": kinds.HIDDEN,
    "in stalls": kinds.STALL,
    "exposed": kinds.EXPOSED,
    "waiting for TP": kinds.WAIT,
    "idle": kinds.IDLE,
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan file; without one the job is planned")
    add_job_flags(parser)
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace: open it at ui.perfetto.dev")
    parser.add_argument("--html", metavar="FILE", help="write a page: timeline, memory, plan, all methods")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate a plan that is read or made."""
    plan = read_plan(args.plan) if args.plan else None
    if plan is not None and args.layout is None:
        args.layout = plan.layout
    choices = choices_from(args)
    print_notes(choices.notes)
    job = choices.job
    with progress("planning and simulating"):
        if plan is None:
            half = replace(choices, deadline=part_of(choices.deadline, 2 if args.html else 1))
            plan = planned_by(half).plan
        timeline = timeline_of(job, plan)
    if args.trace:
        write_trace(timeline, job, plan, args.trace)
    if args.html:
        with progress("planning the other methods"):
            name = _name(choices, args.plan, plan)
            write_page(plan_page(job, name, plan, choices.time_limit_s, choices.deadline), args.html)
    if args.json:
        sys.stdout.write(_json(timeline, job, plan))
        return 0
    out = console()
    out.print(job_line(job), markup=False)
    out.print(_table(timeline, job, plan))
    out.print(
        f"step {format_ns(timeline.makespan_ns)} without the optimizer, "
        f"{timeline.bubble():.1%} of it idle for the pipeline",
        markup=False,
    )
    if args.trace:
        out.print(f"trace written to {args.trace}: open it at ui.perfetto.dev", markup=False)
    if args.html:
        out.print(f"page written to {args.html}", markup=False)
    check_fits(job, plan)
    return 0


def _name(choices: Choices, path: str | None, plan: Plan) -> str:
    """What to call the plan beside the others."""
    if path is not None:
        return f"{plan.planner} ({Path(path).name})"
    return plan.planner if choices.partition == "keep" else f"{plan.planner} + {choices.partition}"


def _static(job: Job, plan: Plan) -> list[int]:
    return [job.footprint(stage.stage, len(stage.layers)).static_bytes for stage in plan.stages]


def write_trace(timeline: Timeline, job: Job, plan: Plan, path: str) -> None:
    """Write the trace file.

    Raises:
        ConfigError: it cannot be written.
    """
    write_text(to_json(timeline, _static(job, plan)), path, "--trace", "trace.json")


def _table(timeline: Timeline, job: Job, plan: Plan) -> Grid:
    table = Grid(f"{plan.planner}: one step, by stage")
    table.add_column("stage", *(name.replace("rebuilt in", "rebuilt\nin") for name in _COLUMNS), "peak")
    for stage, static in enumerate(_static(job, plan)):
        totals = timeline.totals_ns(stage)
        cells = [format_ns(totals.get(kind, 0)) for kind in _COLUMNS.values()]
        table.add_row(str(stage), *cells, format_bytes(static + peak(timeline, stage).size_bytes))
    return table


def _json(timeline: Timeline, job: Job, plan: Plan) -> str:
    stages = [
        {
            "stage": stage,
            "totals_ns": timeline.totals_ns(stage),
            "static_bytes": static,
            "peak_bytes": static + peak(timeline, stage).size_bytes,
        }
        for stage, static in enumerate(_static(job, plan))
    ]
    whole = {
        "schema": SCHEMA,
        **job_facts(job),
        "planner": plan.planner,
        "makespan_ns": timeline.makespan_ns,
        "stages": stages,
    }
    return json.dumps(whole, indent=1) + "\n"
