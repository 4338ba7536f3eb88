"""The whole of ``docs/reproduction.md`` and its images, from predictions and results."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lynx.reproduction.overlap import CLUSTERS, Result
from megatron_lynx.reproduction.published import TAGS
from megatron_lynx.reproduction.text_memory import activations, flops
from megatron_lynx.reproduction.text_overlap import chart, chart_name, lynx_text
from megatron_lynx.reproduction.text_times import (
    Timings,
    calibration_text,
    error_chart,
    layer_text,
    steps_text,
    verdict,
)
from megatron_lynx.reproduction.text_truth import truth_text
from megatron_lynx.reproduction.truth import Compared

HEAD = """# Reproduction of two papers, and of what GPUs measured

Written by `lynx reproduce`; do not edit. Bytes and FLOPs are exact; all times are **predicted** from
estimated costs and a simulated schedule, none is measured here. The first part holds the memory and time
models against public measurements, the second against arXiv 2205.05198, the third the planners against
the claims of arXiv 2406.08756. Results of the third part are kept in `reproduction.json`, which
`lynx reproduce --reuse` takes instead of planning again.
"""


def megatron_text(timings: Timings) -> str:
    """Everything about arXiv 2205.05198."""
    tags = "; ".join(f"[{tag}] {meaning}" for tag, meaning in TAGS.items())
    return "\n".join(
        [
            "## arXiv 2205.05198: selective recomputation and sequence parallelism\n",
            f"Published figures carry a tag: {tags}.\n",
            activations(),
            flops(),
            calibration_text(timings),
            layer_text(timings),
            steps_text(timings),
            "### Verdict\n",
            verdict(timings),
        ]
    )


def document(timings: Timings, results: Sequence[Result], rows: Sequence[Compared]) -> str:
    """The document."""
    return "\n".join([HEAD, truth_text(rows), megatron_text(timings), lynx_text(results)])


def images(timings: Timings, results: Sequence[Result]) -> dict[str, str]:
    """File name -> SVG."""
    found = {"reproduction-errors.svg": error_chart(timings)}
    return found | {chart_name(cluster): chart(results, cluster) for cluster in CLUSTERS}
