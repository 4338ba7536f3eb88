"""The comparison of arXiv 2406.08756 as Markdown and charts."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lynx.reproduction.charts import Bars, svg
from megatron_lynx.reproduction.markdown import bullets, prose, table
from megatron_lynx.reproduction.overlap import (
    ATTENTION,
    CLUSTERS,
    PER_STAGE,
    PP,
    PRIOR,
    SEQUENCE,
    TP,
    Result,
    Spread,
    search_seconds,
    speedups,
)
from megatron_lynx.reproduction.published import HEU_SEARCH_S, LYNX_RANGE, LYNX_UP_TO, Figure
from megatron_lynx.search.workflow import OPTIONS

CHECKMATE = ("checkmate",)
_OVER = (
    ("full", ("full-uniform",)),
    ("block", ("full-block",)),
    ("selective", ("selective",)),
    ("Megatron's best", PRIOR),
    ("checkmate", CHECKMATE),
    ("all prior", (*PRIOR, *CHECKMATE)),
)
"""What a speedup can be over: name and methods, of which the fastest counts."""


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.low:.3f} / {spread.middle:.3f} / {spread.high:.3f} ({spread.count})"


def assumptions() -> str:
    """What had to be assumed, since the paper's settings are not public."""
    return "\n".join(
        [
            "### What was assumed\n",
            prose(
                "Layers, hidden sizes and heads of the paper's models, its cluster sizes and memory, "
                "parallel",
                "sizes, microbatches, sequence length, per-baseline speedups and OPT's search times "
                "were **not",
                "found in public**, nor was any code. So this does not repeat its experiment: it is the same",
                "comparison on settings chosen by the rule below, and only the printed ranges can be held",
                "against it.",
            ),
            bullets(
                "Models: `configs/models/gpt-*.toml`, shapes of that size, of Megatron's own layers, which "
                "the Megatron of that time had with either attention. Those of 1.3B to 7B are common in "
                "public GPT suites; 23B is arithmetic only.",
                f"{TP * PP} GPUs with 40 GB: tensor parallel {TP} inside a node, {PP} pipeline stages, no "
                f"sequence parallelism, sequence {SEQUENCE}, {PER_STAGE} microbatches for every stage, 1F1B; "
                "36.4 GiB for training, Adam unsharded.",
                f"Clusters `{CLUSTERS[0]}` (200 GB/s all-reduce bus bandwidth) and `{CLUSTERS[1]}` (20 "
                "GB/s); "
                "stages are linked by InfiniBand in both. Costs are the presets' estimates; the calibration "
                "above is for another device. Work beside a collective is slowed by 1.2 (NVLink) or 1.05 "
                "(PCIe).",
                f"Attention: {' and '.join(ATTENTION)}, since it is not known which the paper used.",
                "Microbatch: *light*, the smallest power of two with which something must be recomputed; "
                "*tight*, the largest with which Megatron's full recomputation fits. Neither is chosen for "
                "its result.",
                "*full*: uniform groups, the smallest that fits; *block*: as few layers as fit, one "
                "number for "
                "all stages; *selective*: core attention; *checkmate*: the optimal choice of regions "
                "**without** overlap.",
                "HEU and OPT are ours, with the options that `lynx plan` has by default. A stage is solved "
                f"until what it rebuilds on demand is within {OPTIONS.relative_gap:.0%} of a bound, or "
                "until time is up; a step that is marked `~` was stopped by the latter and can depend on the "
                "machine.",
                "Partitioner: *greedy*, the paper's; *search*, ours; *split*: a method on the layers "
                "that HEU "
                "with search chose, so that what overlap adds can be read on one and the same split.",
                "All times are **simulated**, none is measured.",
            ),
        ]
    )


def summary(results: Sequence[Result]) -> str:
    """Speedups per cluster: smallest, median, largest."""
    parts = ["### Speedups: smallest / median / largest (number of settings)\n"]
    for cluster in CLUSTERS:
        here = [r for r in results if r.setting.cluster == cluster]
        lines = [
            [name, *(_spread(speedups(here, name, over)) for _, over in _OVER)]
            for name in ("checkmate", "heu", "opt", "heu + greedy", "heu + search", "opt + split")
        ]
        parts += [f"{cluster}:\n", table(("method", *(f"over {name}" for name, _ in _OVER)), lines)]
    parts.append(
        prose(
            "`-`: nothing to compare with. Methods with a partitioner are compared with the others on the",
            "even split here; every setting below has them on one split as well. Read *over checkmate*",
            "for what windows and stalls are worth: most of the speedup over Megatron's own options comes",
            "from choosing well what to drop, which `checkmate` does as well. Only `checkmate` and OPT",
            "choose layer by layer; HEU has one policy for all layers of a stage, and can lose to",
            "`checkmate` where memory is tight and links are fast.",
        )
    )
    return "\n".join(parts)


def _claimed(figure: Figure) -> str:
    return f"{figure.value:g}x [{figure.tag}]"


def _reached(found: float, claimed: float) -> str:
    return f"{found:.2f}x ({'reaches' if found >= claimed else 'below'} it)"


def claims(results: Sequence[Result]) -> str:
    """The paper's claims beside what was found."""
    ours = ("heu", "opt", "heu + search", "opt + split")
    every = {over: [s for n in ours if (s := speedups(results, n, names))] for over, names in _OVER}
    tops = {over: max(s.high for s in spreads) for over, spreads in every.items() if spreads}
    near = speedups(results, "opt", ("heu",))
    heu_stage, heu_all = search_seconds(results, "heu")
    opt_stage, opt_all = search_seconds(results, "opt")
    limited = sum(r.outcomes["opt"].gap > OPTIONS.relative_gap for r in results)
    first, last = LYNX_RANGE
    lowest = min(s.low for over in ("full", "block", "checkmate") for s in every[over])
    lines = [
        [
            f"v4: up to {_claimed(LYNX_UP_TO)} over existing approaches",
            "; ".join(f"over {over} {_reached(tops[over], LYNX_UP_TO.value)}" for over in tops),
        ],
        [
            f"v1: {_claimed(first)} to {_claimed(last)} over Megatron-LM and Checkmate",
            f"over full, block and checkmate from {lowest:.2f}x to "
            f"{_reached(max(tops[over] for over in ('full', 'block', 'checkmate')), last.value)}",
        ],
        [
            "v1: HEU performs like OPT",
            f"OPT over HEU, smallest / median / largest: {_spread(near)}",
        ],
        [
            f"v1: HEU searches {HEU_SEARCH_S} s on average, 99 % less than OPT",
            f"the solver, one stage: HEU {heu_stage:.2f} s, OPT {opt_stage:.2f} s. A whole job with its "
            f"simulations: HEU {heu_all:.1f} s, OPT {opt_all:.1f} s. OPT met its time limit in {limited} of "
            f"{len(results)} settings. Wall times of a shared machine",
        ],
    ]
    note = prose(
        "What *existing approaches* covers is not public. Our `checkmate` is an optimum over the regions of",
        "a layer, per layer, within the same memory rules; the paper's baseline of that name may be weaker.",
    )
    return "### Claims\n\n" + table(("claim", "found, over all settings"), lines) + "\n" + note


def _seconds(result: Result, name: str) -> str:
    time_ns = result.outcomes[name].iteration_ns
    mark = "~" if result.outcomes[name].gap > OPTIONS.relative_gap else ""
    return "does not fit" if time_ns is None else f"{mark}{time_ns / 1e9:.3f}"


def details(results: Sequence[Result], cluster: str) -> str:
    """Every setting of a cluster: steps in seconds, then speedups."""
    here = [r for r in results if r.setting.cluster == cluster]
    names = {
        "full": "full-uniform",
        "block": "full-block",
        "selective": "selective",
        "checkmate": "checkmate",
        "HEU": "heu",
        "OPT": "opt",
        "HEU + greedy": "heu + greedy",
        "HEU + search": "heu + search",
        "checkmate, that split": "checkmate + split",
        "OPT, that split": "opt + split",
    }
    steps, gains = [], []
    for result in here:
        place = [str(result.setting), result.setting.pressure]
        steps.append([*place, *(_seconds(result, name) for name in names.values())])
        row = [_times(result.speedup(name, over)) for name in ("heu", "opt") for _, over in _OVER[:5]]
        moved = [
            result.speedup("heu + search", PRIOR),
            result.speedup("heu + search", ("heu",)),
            result.speedup("heu + search", ("checkmate + split",)),
            result.speedup("opt + split", ("checkmate + split",)),
        ]
        gains.append([*place, *row, *map(_times, moved)])
    head = [f"{who} over {name}" for who in ("HEU", "OPT") for name, _ in _OVER[:5]]
    head += ["HEU + search over Megatron's best", "over HEU", "over checkmate, that split"]
    head += ["OPT over checkmate, that split"]
    return "\n".join(
        [
            f"### {cluster}: every setting\n",
            "Seconds of a step; `~`: not proven optimal within the time allowed.\n",
            table(("setting", "memory", *names), steps),
            "Speedups:\n",
            table(("setting", "memory", *head), gains),
            f"![Speedups on {cluster}](images/{chart_name(cluster)})\n",
        ]
    )


def chart_name(cluster: str) -> str:
    """File name of a cluster's chart."""
    return f"reproduction-{cluster}.svg"


def chart(results: Sequence[Result], cluster: str) -> str:
    """Speedup over Megatron's best, setting by setting; checkmate has its own bar."""
    names = ("checkmate", "heu", "opt", "heu + search")
    rows = tuple(
        (f"{r.setting} ({r.setting.pressure})", tuple(r.speedup(name, PRIOR) for name in names))
        for r in results
        if r.setting.cluster == cluster
    )
    return svg(
        Bars(
            title=f"{cluster}: speedup over the best of Megatron's own options (simulated)",
            series=("checkmate (no overlap)", "HEU", "OPT", "HEU + partitioner"),
            rows=rows,
            origin=1.0,
            low=0.9,
            high=1.6,
            ticks=(0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6),
            unit="{:.2f}",
        )
    )


def lynx_text(results: Sequence[Result]) -> str:
    """Everything about arXiv 2406.08756."""
    return "\n".join(
        [
            "## arXiv 2406.08756: recomputation inside windows\n",
            assumptions(),
            claims(results),
            summary(results),
            *(details(results, cluster) for cluster in CLUSTERS),
        ]
    )
