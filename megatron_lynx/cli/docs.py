"""``lynx compare --docs FILE``: the comparison of all GPT presets, as Markdown."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lynx.cli.output import read_text, write_text
from megatron_lynx.cli.report import compare_cells, progress, speedup, whole_name
from megatron_lynx.job import Job, make_job
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.rows import Row
from megatron_lynx.search.workflow import MEGATRON_METHODS, best_of, compare, reference
from megatron_lynx.spec import Batch, Parallel
from megatron_lynx.units import format_bytes, format_ns

TUNED = "## Tuned against tuned\n"
"""Where the section of `lynx tune --docs` begins, the document's last."""

CLUSTERS = ("a100-40g-nvlink", "a100-40g-pcie")


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the document: parallel sizes and batch for a model."""

    model: str
    tp: int
    pp: int
    micro_batch_size: int


SETTINGS = (
    Setting("gpt-1.3b", 2, 4, 16),
    Setting("gpt-2.7b", 2, 4, 16),
    Setting("gpt-4.7b", 4, 4, 16),
    Setting("gpt-7b", 4, 4, 16),
    Setting("gpt-13b", 4, 8, 8),
    Setting("gpt-20b", 8, 4, 8),
    Setting("gpt-23b", 8, 5, 8),
)
"""Tensor parallelism inside a node, as few stages as the weights need, and the microbatch that a
user picks for speed: so large that not everything can be kept."""

_HEAD = """# Comparison

Written by `lynx compare --docs docs/comparison.md`; do not edit. Every figure is **simulated** from
estimated costs (a roofline with the efficiencies and link rates of `megatron_lynx/configs/clusters`), none is
measured. Sequence 2048, Transformer Engine's layers with flash attention, 4 microbatches for every stage, no
sequence parallelism. A setting had {seconds:.0f} s, so last digits depend on the machine that wrote this.

- *over Megatron*: speedup over the best of Megatron's own options that fits (no recomputation,
  selective with any set of `--recompute-modules`, full with the best `uniform` or `block` number, or
  offloading).
- *offload* is the best of `--fine-grained-activation-offloading`: which `--offload-modules`, which
  `--activation-offload-fraction` (the number) and which `--recompute-modules` beside it. The link to the
  host is that of `megatron_lynx/configs/clusters`; what is not known is taken in its favour
  (`megatron_lynx/search/offload.py`).
- *over checkmate*: speedup over the optimum **without** overlap, which moves layers between stages
  where the method does. This, not the former, is what rebuilding inside windows and stalls is worth.
- *opt* and *heu* are lynx's planners on Megatron's even split; *+ search* moves layers too. *opt*
  (the default) chooses layer by layer and is never below checkmate; *heu*, the paper's heuristic, has
  one policy for all layers of a stage, and can be.
- *adapipe* is a knapsack per stage without overlap; its other half is *+ search*.
"""


def job_of(setting: Setting, cluster: str) -> Job:
    """The job of one line."""
    return make_job(
        load_model(setting.model),
        Parallel(tp=setting.tp, pp=setting.pp),
        Batch(
            seq_length=2048,
            micro_batch_size=setting.micro_batch_size,
            global_batch_size=4 * setting.pp * setting.micro_batch_size,
        ),
        cluster=load_cluster(cluster),
    )


EACH_S = 120.0
"""What the planning of one setting may take."""


def write_comparison(path: str, each_s: float = EACH_S, settings: Sequence[Setting] = SETTINGS) -> None:
    """Compare everything and write the document; a setting has ``each_s`` seconds.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    old = read_text(path, "--docs", "comparison.md")
    parts = [_HEAD.format(seconds=each_s)]
    details: list[str] = []
    with progress("comparing") as status:
        for cluster in CLUSTERS:
            lines = []
            for setting in settings:
                job = job_of(setting, cluster)
                status.update(f"comparing: {setting.model} on {cluster}")
                rows = compare(job, deadline=time.monotonic() + each_s)
                lines.append(_line(setting, rows))
                details.append(_detail(setting, cluster, job, rows))
            parts.append(_overview(cluster, lines))
    tuned = [TUNED + old.partition(TUNED)[2]] if TUNED in old else []  # `lynx tune --docs` writes it
    text = "\n".join([*parts, "## Every method\n", *details, *tuned])
    write_text(text, path, "--docs", "comparison.md")


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _overview(cluster: str, lines: Sequence[Sequence[str]]) -> str:
    over = ("over Megatron", "over checkmate")
    head = ("model", "TP", "PP", "batch", "Megatron's best", "opt", *over, "opt + search", *over)
    return f"## {cluster}\n\n" + _table(head, lines)


def _line(setting: Setting, rows: Sequence[Row]) -> list[str]:
    """Megatron's best, then ``opt`` beside ``checkmate``: on the even split, and moving layers."""
    megatron = best_of(rows, MEGATRON_METHODS)
    sizes = [str(size) for size in (setting.tp, setting.pp, setting.micro_batch_size)]
    cells = [setting.model, *sizes, _named(megatron)]
    for method in ("opt", "opt + search"):
        lynx = next(row for row in rows if row.method == method)
        time = _time(lynx)
        cells += [time, speedup(lynx, megatron), speedup(lynx, reference(lynx, rows))]
    return cells


def _time(row: Row) -> str:
    return "does not fit" if row.iteration_ns is None else format_ns(row.iteration_ns)


def _named(row: Row | None) -> str:
    if row is None or row.iteration_ns is None:
        return "does not fit"
    return f"{whole_name(row)}: {format_ns(row.iteration_ns)}"


def _detail(setting: Setting, cluster: str, job: Job, rows: Sequence[Row]) -> str:
    head = ("method", "step", "tokens/s", "over Megatron", "over checkmate", "peak", "on demand")
    lines = [[cell or "-" for cell in compare_cells(row, rows)] for row in rows]
    title = (
        f"### {setting.model} on {cluster}, TP {setting.tp}, PP {setting.pp}, "
        f"microbatch {setting.micro_batch_size}, {format_bytes(job.memory_bytes)} a device\n\n"
    )
    return title + _table((*head, "in windows", "layers a stage, or why not"), lines)
