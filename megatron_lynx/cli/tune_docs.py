"""``lynx tune --docs FILE``: each GPT preset, tuned with lynx and without, as a section of a document."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.cli.docs import TUNED
from megatron_lynx.cli.output import read_text, write_text
from megatron_lynx.cli.report import progress
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.found import WITH, WITHOUT, Found, Tuned
from megatron_lynx.search.space import Question
from megatron_lynx.search.tune import Limits, tune
from megatron_lynx.units import format_bytes, format_ns

MODELS = ("gpt-1.3b", "gpt-2.7b", "gpt-4.7b", "gpt-7b", "gpt-13b", "gpt-20b", "gpt-23b")
CLUSTERS = ("a100-40g-nvlink", "a100-40g-pcie", "h100-nvlink")
DEVICES = (16, 64)
EACH_S = 60.0

_HEAD = (
    TUNED
    + """
Written by `lynx tune --docs docs/comparison.md`; do not edit. The best configuration that `lynx tune` finds
for so many devices, with lynx and with Megatron's own options alone: tensor, pipeline, virtual pipeline and
data parallel sizes, microbatch, sequence parallelism, distributed optimizer, layout and recomputation all
chosen freely on both sides. Global batch: 8 sequences a device, of 2048 tokens. Simulated. *open*: how many
configurations might still be faster, for each side; time was limited to {seconds:.0f} s a row.
Megatron's side is its recomputation; offloading is left out.

| model | devices | cluster | best without lynx | step | best with lynx | step | gain | peak | open |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
)


def write_tuned(path: str, jobs: int, each_s: float = EACH_S) -> None:
    """Put the section at the end of the document, in the place of an older one.

    Raises:
        ConfigError: the document cannot be read or written.
    """
    text = read_text(path, "--docs", "comparison.md")
    section = _HEAD.format(seconds=each_s) + "".join(_lines(jobs, each_s))
    whole = text.partition(TUNED)[0].rstrip() + "\n\n" + section
    write_text(whole.lstrip(), path, "--docs", "comparison.md")


def _lines(jobs: int, each_s: float) -> Iterator[str]:
    with progress("tuning") as status:
        for name in MODELS:
            for cluster in CLUSTERS:
                for devices in DEVICES:
                    status.update(f"tuning: {name} on {devices} devices of {cluster}")
                    question = Question(
                        model=load_model(name),
                        cluster=load_cluster(cluster),
                        devices=devices,
                        seq_length=2048,
                        global_batch_size=8 * devices,
                    )
                    limits = Limits(top=1, jobs=jobs, time_limit_s=each_s)
                    yield line_of(tune(question, limits=limits))


def line_of(tuned: Tuned) -> str:
    """One row of the table."""
    question, best = tuned.question, tuned.best(WITH)
    cells = [question.model.name, str(question.devices), question.cluster.name]
    for side in (WITHOUT, WITH):
        cells += _cells(tuned.best(side))
    cells += [f"{tuned.gain:.3f}x" if tuned.gain else "-"]
    cells += [format_bytes(best.fullest[1]) if best else "-"]
    cells += [" / ".join(str(tuned.tallies[side].unproven) for side in (WITHOUT, WITH))]
    return "| " + " | ".join(cells) + " |\n"


def _cells(entry: Found | None) -> list[str]:
    if entry is None:
        return ["nothing fits", "-"]
    return [f"{entry.config}: {entry.row.method}", format_ns(entry.iteration_ns)]
