"""Tables for people. Numbers are rounded here and nowhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.status import Status
from rich.text import Text

from megatron_lynx.footprint import RESERVED
from megatron_lynx.job import Job
from megatron_lynx.planner.baselines import modules_of
from megatron_lynx.search.advice import best_change, breakdown
from megatron_lynx.search.offload import OFFLOAD, offload_flags
from megatron_lynx.search.rows import Row
from megatron_lynx.search.throughput import gpus
from megatron_lynx.search.workflow import MEGATRON_METHODS, best_of, reference
from megatron_lynx.units import GIB, format_bytes, format_ns

NO_BUDGET_BYTES = 1 << 59
"""More than any device has: a run that named no budget plans for 2^60."""

PLAIN_WIDTH = 80
"""Width of tables when the output is not a terminal and COLUMNS does not say another."""


def console(*, err: bool = False) -> Console:
    """Where tables go: standard output, or standard error for notes and progress."""
    stream = sys.stderr if err else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    plain = int(columns) if columns.isdigit() and int(columns) > 0 else PLAIN_WIDTH
    return Console(file=stream, width=None if stream.isatty() else plain, highlight=False)


def grid(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: int = 1) -> str:
    """A table as plain text, or several with the same first column where one would be wider than ``width``.

    No cell is cut. The words of a head may stand below each other; the first ``left`` columns begin at the
    left.
    """
    heads = [text.split("\n") for text in head]
    height = max(map(len, heads))
    lines = [[*([""] * (height - len(words))), *words] for words in heads]
    columns = [[*lines[i], *(row[i] for row in rows)] for i in range(len(head))]
    widths = [max(map(len, column)) for column in columns]
    parts, part = [], [0]
    for i in range(1, len(head)):
        if len(part) > 1 and sum(widths[k] + len(_GAP) for k in part) + widths[i] > width:
            parts.append(part)
            part = [0]
        part.append(i)
    parts.append(part)
    blocks = []
    for chosen in parts:
        aligned = [
            [cell.ljust(widths[i]) if i < left else cell.rjust(widths[i]) for cell in columns[i]]
            for i in chosen
        ]
        text = [_GAP.join(cells).rstrip() for cells in zip(*aligned, strict=True)]
        rule = _GAP.join("-" * widths[i] for i in chosen)
        blocks.append("\n".join([*text[:height], rule, *text[height:]]))
    return "\n\n".join([f"{title}\n{blocks[0]}" if title else blocks[0], *blocks[1:]])


_GAP = "  "


class Grid:
    """A ``grid`` that is filled column by column and row by row, and printed at the console's width.

    Missing cells are empty. ``left`` is how many columns begin at the left.
    """

    def __init__(self, title: str = "", left: int = 1) -> None:
        self.title, self.left = title, left
        self.head: list[str] = []
        self.rows: list[list[str]] = []

    def add_column(self, *names: str) -> None:
        """Add columns by their heads."""
        self.head += names

    def add_row(self, *cells: str) -> None:
        """Add a row."""
        self.rows.append(list(cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The text of the table for rich, which prints it."""
        rows = [[*row, *([""] * (len(self.head) - len(row)))] for row in self.rows]
        text = grid(self.title, self.head, rows, options.max_width, self.left)
        yield Text(text + "\n", no_wrap=True, overflow="ignore")


def show(out: Console, text: str) -> None:
    """Print text as it stands: no colour, nothing wrapped or cut."""
    out.print(Text(text), soft_wrap=True)


def gib(size_bytes: int) -> str:
    """Bytes in GiB, for a column whose head names the unit."""
    return f"{size_bytes / GIB:.2f}"


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
    """Lines that say what is planned, and what the figures assume."""
    p, b, m = job.parallel, job.batch, job.model
    sizes = [f"TP {p.tp}", f"PP {p.pp}"]
    sizes += [f"VPP {p.vpp}"] if p.vpp > 1 else []
    sizes += [f"DP {p.dp}"] if p.dp > 1 else []
    sizes += ["SP"] if p.sequence_parallel else []
    place = job.cluster.name if job.cluster else "no cluster"
    limited = job.memory_bytes < NO_BUDGET_BYTES
    budget = f"{format_bytes(job.memory_bytes)} a device" if limited else "no budget"
    precision = "16-bit" if m.dtype_bytes == 2 else "fp32"
    return (
        f"{m.name} on {gpus(job)} x {place}: {', '.join(sizes)}\n"
        f"sequence {b.seq_length}, batch {b.micro_batch_size} x {job.microbatches} microbatches, {budget}\n"
        f"assumed: {m.transformer_impl} layers, {m.attention} attention, {precision}\n"
        f"costs: {job.costs.source}"
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


def stage_table(job: Job, row: Row, width: int) -> str:
    """One line per stage: memory in GiB, times of one microbatch in ms, and what recomputation costs."""
    memory = ("static\nGiB", "kept\nGiB", "rebuilt\nGiB", "peak\nGiB", "free\nGiB")
    times = ("forward\nms", "backward\nms", "in windows\nms", "on demand\nms")
    head = ("stage", "layers", "in\nflight", *memory, *times)
    rows = [
        (
            str(s.stage),
            layer_span(s.layers),
            str(s.in_flight),
            *map(gib, (s.static_bytes, s.kept_bytes, s.rebuilt_bytes, s.peak_bytes)),
            gib(job.memory_bytes - s.peak_bytes) if job.memory_bytes < NO_BUDGET_BYTES else "-",
            *(f"{ns / 1e6:.2f}" for ns in (s.forward_ns, s.backward_ns)),
            *(f"{ns / 1e6:.2f}" for ns in (s.recompute_hidden_ns, s.recompute_exposed_ns)),
        )
        for s in row.stages
    ]
    return grid(f"{row.method}: stages, times of one microbatch", head, rows, width, left=2)


def summary(job: Job, row: Row) -> str:
    """Time and throughput of a step."""
    if row.iteration_ns is None or row.tokens_per_second is None:
        return f"{row.method}: {row.reason}"
    share = "" if row.mfu is None else f", MFU {row.mfu:.1%}"
    return (
        f"step {format_ns(row.iteration_ns)}: {row.tokens_per_second / gpus(job):,.0f} tokens/s and "
        f"{row.tflops_per_gpu:.0f} TFLOP/s per GPU{share}" + (", host-bound" if row.host_bound else "")
    )


def launch_flags(job: Job, row: Row) -> str:
    """The flags that a row stands for, beside those of the job itself."""
    flags = _RECOMPUTE.get(row.planner, offload_flags(row.planner) or None)
    kind, _, number = row.planner.rpartition("-")
    if flags is None and kind in ("full-uniform", "full-block"):
        method = kind.removeprefix("full-")
        flags = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {number}"
        if kind == "full-block" and number == "0":
            flags = ""
    if flags is None and modules_of(row.planner):
        flags = f"--recompute-granularity selective --recompute-modules {' '.join(modules_of(row.planner))}"
    if flags is None:
        size = format_bytes(job.memory_bytes).replace(" ", "")
        limit = f" --lynx-budget {size}" if job.memory_bytes < NO_BUDGET_BYTES else ""
        flags = f"--recompute-method lynx --lynx-planner {row.planner}{limit}"
    layout = f"--pipeline-model-parallel-layout '{row.layout}'" if row.layout else ""
    return " ".join(filter(None, (flags, layout))) or "no recomputation flag at all"


_RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective --recompute-modules core_attn",
}


def compare_table(job: Job, rows: Sequence[Row], width: int) -> str:
    """The methods that fit: time, throughput, speedups over Megatron's best and over the optimum without
    overlap, memory; then what the others would need."""
    rates = ("step", "TFLOP/s\nper GPU", "MFU", "tokens/s\nper GPU", "peak\nGiB")
    head = ("method", *rates, "over\nMegatron", "over\ncheckmate", "on demand\nms", "in windows\nms")
    fitting = [row for row in rows if row.iteration_ns is not None]
    parts = []
    if fitting:
        lines = [_line(job, row, rows) for row in fitting]
        parts.append(grid("methods that fit (step simulated)", head, lines, width))
    lacking = [row for row in rows if not row.fits]
    short = [(row.method, gib(row.needed_bytes), str(row.stage)) for row in lacking if row.needed_bytes]
    if short:
        heads = ("does not fit", "needs\nGiB", "on\nstage")
        parts.append(grid("", heads, short, width))
    parts += [row.reason for row in lacking if row.reason and not row.needed_bytes]
    return "\n\n".join(parts)


def _line(job: Job, row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    worst = max(stage.peak_bytes for stage in row.stages)
    return (
        row.method,
        format_ns(row.iteration_ns or 0),
        f"{row.tflops_per_gpu or 0:.1f}",
        "-" if row.mfu is None else f"{row.mfu:.1%}",
        f"{(row.tokens_per_second or 0) / gpus(job):,.0f}",
        gib(worst),
        speedup(row, best_of(rows, MEGATRON_METHODS)),
        speedup(row, reference(row, rows)),
        f"{sum(s.recompute_exposed_ns for s in row.stages) / 1e6:.2f}",
        f"{sum(s.recompute_hidden_ns for s in row.stages) / 1e6:.2f}",
    )


def verdict(job: Job, rows: Sequence[Row]) -> list[str]:
    """What follows from a comparison: the winner, its flags, its stages' peaks; or why nothing fits."""
    fitting = [row for row in rows if row.iteration_ns is not None]
    if not fitting:
        return _nothing_fits(job)
    plain = next((row for row in fitting if row.planner == "none"), None)
    stock = best_of(fitting, MEGATRON_METHODS)
    best = min(fitting, key=lambda row: row.iteration_ns or 0)
    lines = []
    if plain is not None:
        lines.append("Everything fits; use no recomputation.")
        best = _worth_it(best, plain)
    if stock is not None:
        lines.append(f"Megatron's best: {stock.method}: {launch_flags(job, stock)}")
    if stock is None or best is not stock:
        over = f", {speedup(best, stock)} Megatron's best" if stock else ""
        lines.append(f"fastest: {best.method}{over}: {launch_flags(job, best)}")
    lines.append(summary(job, best))
    peaks = " ".join(gib(stage.peak_bytes) for stage in best.stages)
    layers = " ".join(str(len(stage.layers)) for stage in best.stages)
    reserved = gib(round(RESERVED * max(stage.peak_bytes for stage in best.stages)))
    lines.append(f"peak of each stage: {peaks} GiB; layers: {layers}")
    lines.append(f"The allocator may reserve up to {reserved} GiB for the largest.")
    lines.append("checkmate is the optimum without overlap, moving layers where the method does.")
    return lines


def _worth_it(best: Row, plain: Row) -> Row:
    """The fastest row, or no recomputation where that is as fast to a thousandth."""
    close = (plain.iteration_ns or 0) <= (best.iteration_ns or 0) * 1.001
    return plain if close else best


def _nothing_fits(job: Job) -> list[str]:
    """Memory by owner, and the change that would help most."""
    found, change = breakdown(job), best_change(job)
    owners = ", ".join(f"{owner} {gib(size)}" for owner, size in found.owners)
    lines = [
        f"Nothing fits {gib(job.memory_bytes)} GiB. With full recomputation stage {found.stage} needs "
        f"{gib(found.needed_bytes)} GiB: {owners}."
    ]
    if change is not None:
        enough = "which fits" if change.needed_bytes <= job.memory_bytes else "which is not enough alone"
        devices = ", with twice the GPUs" if change.gpus_factor > 1 else ""
        lines.append(f"{change.flag} would help most{devices}: {gib(change.needed_bytes)} GiB, {enough}.")
    return lines


def compare_cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """The cells of one method in a comparison, as plain text."""
    name = whole_name(row)
    if row.iteration_ns is None:
        return (name, *[""] * 7, row.reason or "")
    worst = max(row.stages, key=lambda s: s.peak_bytes)
    return (
        name,
        format_ns(row.iteration_ns),
        f"{row.tokens_per_second:,.0f}",
        speedup(row, best_of(rows, MEGATRON_METHODS)),
        speedup(row, reference(row, rows)),
        format_bytes(worst.peak_bytes),
        format_ns(sum(s.recompute_exposed_ns for s in row.stages)),
        format_ns(sum(s.recompute_hidden_ns for s in row.stages)),
        " ".join(str(len(s.layers)) for s in row.stages),
    )


def whole_name(row: Row) -> str:
    """What a row is called where there is room: how much of what is offloaded, if that is it."""
    return row.planner if row.method == OFFLOAD else row.method


def speedup(row: Row, other: Row | None) -> str:
    """``1.234x``, or nothing to compare with."""
    factor = row.speedup_over(other) if other is not None else None
    return "-" if factor is None else f"{factor:.3f}x"
