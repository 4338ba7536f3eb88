"""``lynx compare``: all methods side by side."""

from __future__ import annotations

import argparse
import sys

from megatron_lynx.cli.docs import EACH_S, write_comparison
from megatron_lynx.cli.html import comparison_page, write_page
from megatron_lynx.cli.job import add_job_flags, choices_from
from megatron_lynx.cli.report import compare_table, console, job_line, print_notes, progress, show, verdict
from megatron_lynx.search.rows import compare_json
from megatron_lynx.search.workflow import compare, part_of
from megatron_lynx.units import parse_ns


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_job_flags(parser, plans=False)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--switches", action="store_true", help="also opt with one kind of window off")
    parser.add_argument("--html", metavar="FILE", help="write a page: each method's timeline, memory, plan")
    parser.add_argument("--docs", metavar="FILE", help="write the comparison of all presets as Markdown")


def run(args: argparse.Namespace) -> int:
    """Compare, print."""
    if args.docs:
        limit = parse_ns(args.time_limit, "--time-limit") / 1e9 if args.time_limit else EACH_S
        write_comparison(args.docs, limit)
        return 0
    choices = choices_from(args)
    job = choices.job
    print_notes(choices.notes)
    with progress("planning") as status:
        rows = compare(
            job,
            switches=args.switches,
            time_limit_s=choices.time_limit_s,
            deadline=part_of(choices.deadline, 2 if args.html else 1),
            progress=lambda name: status.update(f"planning: {name}"),
        )
    if args.html:
        with progress("planning for the page"):
            write_page(comparison_page(job, choices.time_limit_s, choices.deadline), args.html)
    if args.json:
        sys.stdout.write(compare_json(job, rows))
        return 0
    out = console()
    show(out, job_line(job) + "\n")
    show(out, compare_table(job, rows, out.width) + "\n")
    for line in verdict(job, rows):
        show(out, line)
    if choices.refused:
        flags = " ".join(choices.refused)
        show(out, f"Training with lynx refuses {flags}; its rows show what it would gain without.")
    if args.html:
        out.print(f"page written to {args.html}", markup=False)
    return 0
