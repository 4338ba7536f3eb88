"""``lynx report DIR``: what a run did, planned beside measured."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lynx.cli.html import methods_of, write_page
from megatron_lynx.cli.html_data import Method, page_data
from megatron_lynx.cli.job import read_profile, whole
from megatron_lynx.cli.report import Grid, console, job_line, print_notes, progress
from megatron_lynx.cli.run_files import Report, measured, read_report
from megatron_lynx.presets import load_cluster
from megatron_lynx.units import format_bytes, format_ns

SCHEMA = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("folder", metavar="DIR", help="the folder that was given to --lynx-report")
    parser.add_argument("--html", metavar="FILE", help="write a page: planned beside measured, and the plan")
    parser.add_argument("--skip", type=whole, metavar="N", default=1, help="steps to leave out (default: 1)")
    parser.add_argument("--run", metavar="NAME", help="a run before the last one, where a job was restarted")
    parser.add_argument("--profile", metavar="FILE", help="costs to price the plan by, for those of the run")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="likewise, estimated for a cluster")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Read, compare, print, write."""
    report = read_report(
        Path(args.folder),
        skip=args.skip,
        run=args.run,
        profile=read_profile(args.profile) if args.profile else None,
        cluster=load_cluster(args.cluster) if args.cluster else None,
    )
    found = measured(report)
    print_notes(_notes(report))
    if args.html:
        with progress("planning the other methods"):
            write_page(_page(report, found), args.html)
    if args.json:
        sys.stdout.write(json.dumps({"schema": SCHEMA, **found}, indent=1) + "\n")
        return 0
    out = console()
    out.print(job_line(report.job), markup=False)
    for stage in found["stages"]:
        out.print(_table(stage))
    out.print(found["note"], style="dim", markup=False)
    if args.html:
        out.print(f"page written to {args.html}", markup=False)
    return 0


def _notes(report: Report) -> list[str]:
    """What a reader has to know about the files: restarts, ranks without any, ranks that stopped early."""
    first, last = report.iterations
    notes = []
    if len(report.runs) > 1:
        others = ", ".join(name for name in report.runs if name != report.run)
        notes.append(
            f"run {report.run}, iterations {first} to {last}; other runs wrote there too: --run {others}"
        )
    for rank in report.missing:
        notes.append(f"steps.{rank}.jsonl has no step of this run: rank {rank} wrote nothing, or elsewhere")
    if report.ahead:
        ranks = ", ".join(map(str, report.ahead))
        notes.append(f"ranks {ranks} made more steps than others: the run was killed, or still trains")
    return notes


def _page(report: Report, found: dict[str, Any]) -> dict[str, Any]:
    name = f"{report.plan.planner} (this run)"
    chosen = Method(name=name, plan=report.plan, timeline=report.timeline)
    methods = [chosen, *methods_of(report.job)]
    return page_data(f"{report.job.model.name}: planned and measured", report.job, methods, found)


def _table(stage: dict[str, Any]) -> Grid:
    """Two columns for each figure: the plan's, the run's."""
    table = Grid(f"stage {stage['stage']}: planned | measured")
    table.add_column("in a step, or in\none opening of a window", "time or bytes", "opened", "work")
    table.add_column("wait after it", "rebuilt bytes")
    for row in stage["sums"]:
        text = format_ns if row["unit"] == "ns" else format_bytes
        table.add_row(row["name"], _both(row["planned"], row["measured"], text))
    for row in stage["windows"]:
        planned, found = row["planned"], row["measured"]
        cells = [
            _both(planned["opened"], found["opened"], lambda n: f"{n:g}"),
            _both(planned["work_ns"], found["work_ns"], format_ns),
            _both(planned["wait_ns"], found["wait_ns"], format_ns),
            _both(planned["bytes"], found["bytes"], format_bytes),
        ]
        table.add_row(row["name"], "", *cells)
    return table


def _both(planned: Any, found: Any, text: Callable[[int], str]) -> str:
    return " | ".join("-" if value is None else text(value) for value in (planned, found))
