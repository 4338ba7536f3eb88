"""Tables for people. Numbers are rounded here and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.table import Table

from megatron_lynx.job import Job
from megatron_lynx.search.rows import Row
from megatron_lynx.search.workflow import MEGATRON_METHODS, best_of, reference
from megatron_lynx.units import format_bytes, format_ns

NO_BUDGET_BYTES = 1 << 59
"""More than any device has: a run that named no budget plans for 2^60."""

NOT_FOR_MACHINES = 160
"""Width of tables when the output is not a terminal, so that nothing is cut."""


def console(*, err: bool = False) -> Console:
    """Where tables go: standard output, or standard error for notes and progress."""
    stream = sys.stderr if err else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else NOT_FOR_MACHINES, highlight=False)


@contextmanager
def progress(text: str) -> Iterator[Status]:
    """A spinner on standard error while something takes its time; nothing without a terminal."""
    with console(err=True).status(text) as status:
        yield status


def print_notes(notes: Iterable[str]) -> None:
    """Notes about the input, one line each, on standard error."""
    for note in notes:
        console(err=True).print(f"note: {note}", style="dim", markup=False, soft_wrap=True)


def job_line(job: Job) -> str:
    """One line that says what is planned."""
    p, b = job.parallel, job.batch
    sizes = [f"TP {p.tp}", f"PP {p.pp}"]
    sizes += [f"VPP {p.vpp}"] if p.vpp > 1 else []
    sizes += [f"DP {p.dp}"] if p.dp > 1 else []
    sizes += ["SP"] if p.sequence_parallel else []
    place = job.cluster.name if job.cluster else "no cluster"
    limited = job.memory_bytes < NO_BUDGET_BYTES
    budget = f"{format_bytes(job.memory_bytes)} a device" if limited else "no budget"
    return (
        f"{job.model.name} ({job.model.attention} attention) on {place}, {', '.join(sizes)}, "
        f"sequence {b.seq_length}, batch {b.micro_batch_size} x {job.microbatches} microbatches, "
        f"{budget}; costs: {job.costs.source}"
    )


def layer_span(layers: Sequence[int]) -> str:
    """Layer indices as spans: ``0-3, 8-11``."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and spans[-1][-1] == layer - 1:
            spans[-1][1:] = [layer]
        else:
            spans.append([layer])
    return ", ".join("-".join(map(str, span)) for span in spans) or "-"


def stage_table(job: Job, row: Row) -> Table:
    """One line per stage: memory, time, and what recomputation costs."""
    table = Table(title=f"{row.method}: stages, times of one microbatch")
    table.add_column("stage", justify="right")
    table.add_column("layers")
    for name in ("in flight", "static", "kept", "rebuilt", "peak", "free", "forward", "backward"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rebuilt in windows", justify="right")
    table.add_column("on demand", justify="right")
    for s in row.stages:
        table.add_row(
            str(s.stage),
            layer_span(s.layers),
            str(s.in_flight),
            *map(format_bytes, (s.static_bytes, s.kept_bytes, s.rebuilt_bytes, s.peak_bytes)),
            format_bytes(job.memory_bytes - s.peak_bytes),
            *map(format_ns, (s.forward_ns, s.backward_ns)),
            *map(format_ns, (s.recompute_hidden_ns, s.recompute_exposed_ns)),
        )
    return table


def summary(row: Row) -> str:
    """Time of a step and the layout."""
    assert row.iteration_ns is not None
    layout = f"; --pipeline-model-parallel-layout '{row.layout}'" if row.layout else ""
    return f"step {format_ns(row.iteration_ns)}, {row.tokens_per_second:,.0f} tokens/s{layout}"


def compare_table(job: Job, rows: Sequence[Row]) -> Table:
    """All methods: time, speedups over Megatron's best and over the optimum without overlap."""
    table = Table(title="all methods", caption=_caption(best_of(rows, MEGATRON_METHODS)))
    table.add_column("method", no_wrap=True)
    for name in ("step", "tokens/s", "over Megatron", "over checkmate", "peak", "on demand", "in windows"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layers a stage, or why not")
    for row in rows:
        table.add_row(*compare_cells(row, rows))
    return table


def compare_cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """The cells of one method in a comparison, as plain text."""
    if row.iteration_ns is None:
        return (row.method, *[""] * 7, row.reason or "")
    worst = max(row.stages, key=lambda s: s.peak_bytes)
    return (
        row.method,
        format_ns(row.iteration_ns),
        f"{row.tokens_per_second:,.0f}",
        speedup(row, best_of(rows, MEGATRON_METHODS)),
        speedup(row, reference(row, rows)),
        format_bytes(worst.peak_bytes),
        format_ns(sum(s.recompute_exposed_ns for s in row.stages)),
        format_ns(sum(s.recompute_hidden_ns for s in row.stages)),
        " ".join(str(len(s.layers)) for s in row.stages),
    )


def speedup(row: Row, other: Row | None) -> str:
    """``1.234x``, or nothing to compare with."""
    factor = row.speedup_over(other) if other is not None else None
    return "-" if factor is None else f"{factor:.3f}x"


def _caption(megatron: Row | None) -> str:
    best = f"Megatron's best that fits: {megatron.method}" if megatron else "nothing of Megatron's own fits"
    lines = [
        f"{best}; checkmate is the optimum without overlap, moving layers where the method does.",
        "On demand and in windows: sums over the stages, for one microbatch.",
    ]
    return "\n".join(lines)
