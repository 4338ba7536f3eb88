"""``lynx plan``: plan one job and write the plan."""

from __future__ import annotations

import argparse
import sys

from megatron_lynx.cli.job import add_job_flags, choices_from, planned_by
from megatron_lynx.cli.output import write_text
from megatron_lynx.cli.report import (
    console,
    job_line,
    launch_flags,
    print_notes,
    progress,
    show,
    stage_table,
    summary,
)
from megatron_lynx.errors import InfeasibleError
from megatron_lynx.plan import Plan
from megatron_lynx.search.advice import advice
from megatron_lynx.search.rows import compare_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_job_flags(parser)
    parser.add_argument("--output", "-o", metavar="FILE", help="write the plan: text, or JSON for .json")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Plan, print, write."""
    choices = choices_from(args)
    job = choices.job
    print_notes(choices.notes)
    with progress(f"planning with {choices.planner}"):
        try:
            planned = planned_by(choices)
        except InfeasibleError as error:
            error.args = (f"{error}; {advice(job)}",)
            raise
    row = planned.row()
    if args.output:
        write_plan(planned.plan, args.output)
    if args.json:
        sys.stdout.write(compare_json(job, [row]))
        return 0
    out = console()
    show(out, job_line(job) + "\n")
    show(out, stage_table(job, row, out.width) + "\n")
    show(out, summary(job, row))
    if any(s.recompute_hidden_ns or s.recompute_exposed_ns for s in row.stages):
        show(out, f"flags: {launch_flags(job, row)}")
    else:
        show(out, "Everything fits; use no recomputation.")
    if args.output:
        out.print(f"plan written to {args.output}", markup=False)
    return 0


def write_plan(plan: Plan, path: str) -> None:
    """Write the plan in the form that the file's name asks for.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(plan.to_json() if path.endswith(".json") else str(plan), path, "--output", "plan.txt")
