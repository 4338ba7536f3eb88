"""A bench as a table on the terminal, and as the page ``docs/benchmarks.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from megatron_lynx.cli.bench_result import Case, Measured, best_stock, front
from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.estimate import estimate_costs
from megatron_lynx.layers import kind_of, layer_graph
from megatron_lynx.plan import Window
from megatron_lynx.planner.price import candidates
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.spec import Batch, Model, Parallel

COLUMNS = (
    "method",
    "step (s)",
    "quartiles",
    "/ none",
    "peak (MB)",
    "/ none",
    "budget (MB)",
    "rebuilt win / stall / demand",
    "hidden by plan",
    "hidden by clock",
    "predicted step",
    "predicted peak",
)


def bench_table(case: Case) -> Table:
    """All methods of one case, smallest peak first."""
    table = Table(title=f"{case.name}, link {case.link}: medians of {case.rounds} interleaved steps")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in ordered(case):
        table.add_row(*cells(case, row))
    return table


def ordered(case: Case) -> list[Measured]:
    """The rows in the order of a table."""
    return sorted(case.rows, key=lambda row: (row.kind == "demand", row.peak_bytes))


def cells(case: Case, row: Measured) -> tuple[str, ...]:
    """One row as text. A star marks the Pareto front of all methods."""
    none = case.row("none") or row
    best = front(r for r in case.rows if r.kind != "demand")
    star = " *" if row in best else ""
    rebuilt = (row.rebuilt_in_windows, row.rebuilt_in_stalls, row.rebuilt_on_demand)
    return (
        row.name + star,
        f"{row.step_ns / 1e9:.3f}",
        f"{row.low_ns / 1e9:.3f}-{row.high_ns / 1e9:.3f}",
        f"{row.step_ns / none.step_ns:.3f}",
        f"{row.peak_bytes / 1e6:.1f}",
        f"{row.peak_bytes / none.peak_bytes:.2f}",
        "" if row.target_bytes is None else f"{row.target_bytes / 1e6:.1f}",
        " / ".join(map(str, rebuilt)) if row.kind != "stock" else "",
        _percent(_planned_share(row)) if row.kind == "lynx" else "",
        _percent(case.hidden_share(row)) if row.kind == "lynx" else "",
        _predicted(row.predicted_step_ns, 1e9, 3, row.step_error),
        _predicted(row.predicted_peak_bytes, 1e6, 1, row.peak_error),
    )


def _planned_share(row: Measured) -> float | None:
    """The share of recomputation that the simulated plan hides."""
    hidden, exposed = row.planned_hidden_ns or 0, row.planned_exposed_ns or 0
    return hidden / (hidden + exposed) if hidden + exposed else None


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _predicted(value: int | None, unit: float, digits: int, error: float | None) -> str:
    if value is None or error is None:
        return "no plan"
    return f"{value / unit:.{digits}f} ({error:+.1%})"


# --- the page ------------------------------------------------------------------------------------

_HEAD = """# Benchmarks

Written by `lynx bench --docs docs/benchmarks.md`; do not edit. Every step time is **measured** in real
training by Megatron-Core; predictions stand beside it.

Two ranks, one core each, train one GPT over gloo: in two network namespaces joined by a cable whose rate
`tc` limits, or over the loopback. All methods run in one process on one model and take turns step by step;
each first ran one step under the storage meter, which also warmed it up. A step is whole: schedule, gradient
norm and optimizer, the slower rank's time. glibc is told to reuse freed memory and to ask for large pages,
as a caching allocator would (`MALLOC_*`, `GLIBC_TUNABLES`); all methods run under that.

- *quartiles*: of the step time; *peak*: activations and temporaries of forward and backward passes, by a
  meter that sees every storage, the same for all methods, the fuller rank's.
- *budget*: the peak that a lynx plan was made for. Where the meter saw more, or much less, the plan was
  made again for a corrected budget, at most three times.
- *rebuilt*: storages in windows of collectives, in pipeline stalls, and on demand, over both ranks.
- *hidden by plan*: the share of recomputation time that the simulator says windows and stalls hide. *By
  clock*: 1 - (lynx - none) / (windows off - none).
- *predicted*: by the simulator from costs that were measured in the same process, before the rounds and
  after each of them, and how far off it is.
- A star marks the Pareto front of step time and peak over Megatron's methods and lynx's. *windows off* is
  the same plan with everything rebuilt on demand.
"""


def docs_text(machine: Mapping[str, Any], cases: Sequence[Case]) -> str:
    """The page."""
    facts = f"{machine['cores']} cores of {machine['processor']}, {machine['device']}, {machine['date']}"
    parts = [_HEAD, f"Machine: {facts}. {_on_gpus()}\n"]
    for case in cases:
        parts += [_section(case)]
    parts += [_LEFT_OUT]
    return "\n".join(parts)


def _section(case: Case) -> str:
    m, p, b = case.model, case.parallel, case.batch
    micro = b["global_batch_size"] // (b["micro_batch_size"] * p["dp"])
    job = (
        f"{m['num_layers']} layers, hidden {m['hidden_size']}, {m['num_attention_heads']} heads, sequence "
        f"{b['seq_length']}, micro-batch {b['micro_batch_size']} x {micro}, dropout "
        f"{m['hidden_dropout']}, TP {p['tp']}, PP {p['pp']}"
    )
    lines = [f"## {case.name}, link {case.link}\n", f"{job}. Medians of {case.rounds} rounds.\n"]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(cells(case, row)) + " |" for row in ordered(case)]
    lines += ["", f"![step time against peak](bench-{case.name}-{case.link}.svg)", "", *findings(case), ""]
    return "\n".join(lines)


def findings(case: Case) -> list[str]:
    """What a case says, in sentences."""
    lines = [*_capacity(case)]
    none, full = case.row("none"), case.row("full-uniform-1")
    lynx = [row for row in case.rows if row.kind == "lynx"]
    for row in sorted(lynx, key=lambda r: r.peak_bytes):
        words = [f"- {row.name} ({row.peak_bytes / 1e6:.1f} MB):"]
        if none is not None:
            words.append(f"{row.step_ns / none.step_ns - 1:+.1%} against none,")
        if full is not None:
            words.append(f"{full.step_ns / row.step_ns:.2f}x as fast as full recomputation")
            most = "" if none is None else f" ({full.step_ns / none.step_ns:.2f}x would be all of it hidden)"
            words[-1] += f"{most},"
        rival = best_stock(case, row)
        if rival is not None:
            words.append(
                f"{rival.step_ns / row.step_ns:.2f}x the fastest stock method of its size, {rival.name};"
            )
        off = case.row(f"{row.name}, windows off")
        words.append(
            "its plan uses no window."
            if off is None
            else f"its windows bring {off.step_ns / row.step_ns:.2f}x."
        )
        lines.append(" ".join(words))
    for name, errors, allowed in (
        ("step time", [r.step_error for r in case.rows], 0.08),
        ("peak", [r.peak_error for r in case.rows], 0.03),
    ):
        known = [abs(error) for error in errors if error is not None]
        if known:
            good = sum(error <= allowed for error in known)
            share = f"within {allowed:.0%} in {good} of {len(known)} rows"
            lines.append(f"- Predicted {name}: {share}, at worst {max(known):.1%} off.")
    beaten = [row.name for row in lynx if any(o.beats(row) for o in case.rows if o.kind == "stock")]
    lines.append(f"- Lynx rows that a stock method beats in both: {', '.join(beaten) or 'none'}.")
    return lines


def _capacity(case: Case) -> list[str]:
    """How much of a layer collectives are, and what the windows of its backward could hold, beside what
    there is to run again."""
    layer = CostTable.from_json(json.dumps(case.costs), "the bench's costs").layer
    model, parallel = Model(**case.model), Parallel(**case.parallel)
    windows = [layer.window_ns(Window("bwd", 0, slot)) for slot in kind_of(model).backward_slots(parallel)]
    if not windows:
        return []
    graph = layer_graph(model, parallel, Batch(**case.batch))
    names = [n for n in candidates(graph) if not graph.region(n).communicates]
    work, slowed = (sum(layer.rebuild_ns(n, hidden=h) for n in names) / 1e6 for h in (False, True))
    return [
        f"- Collectives are {_collective_share(layer):.0%} of a layer's forward.",
        f"- The windows of one layer's backward hold {sum(windows) / 1e6:.0f} ms of work. To run again all "
        f"of it that needs no collective takes {work:.0f} ms, or {slowed:.0f} ms beside a collective.",
    ]


def _collective_share(layer: LayerCosts) -> float:
    waits = sum(time for slot, time in layer.collective_ns.items() if slot.startswith("fwd:"))
    return waits / layer.layer_forward_ns


def _on_gpus() -> str:
    """The share of collectives in a layer's forward on GPUs, estimated, to compare a bench's links with."""
    model, parallel = load_model("gpt-7b"), Parallel(tp=4)
    batch = Batch(seq_length=2048, micro_batch_size=4, global_batch_size=4)
    shares = []
    for name in ("a100-40g-nvlink", "a100-40g-pcie"):
        layer = estimate_costs(model, parallel, batch, load_cluster(name)).layer
        shares.append(f"{_collective_share(layer):.0%} on {name}")
    return (
        "What its links stand for can be told from how much of a layer's forward collectives are; for GPT-7B "
        f"with TP 4 lynx estimates {' and '.join(shares)}."
    )


_LEFT_OUT = """## Left out

Of Megatron's fine-grained `--recompute-modules`, `core_attn` is *selective* here. Left out are `layernorm`
(Megatron discards a norm's output with `CheckpointWithoutOutput`, which without Transformer Engine ends in a
NameError), `mlp` where linears have biases (the checkpoint returns the bias parameter from an autograd
function, whose backward then calls itself without end), and the modules that this model lacks: experts,
latent attention, gated delta net.

`scripts/bench/gpu.sh` runs the same bench on CUDA devices. **It has never been run.**
"""
