"""The page's data: plans, timelines and memory as JSON values, in whole nanoseconds and bytes.

A timeline of thousands of passes is small here because passes of the same kind share one template
(``simulator.passes.Pass``), and runs that are as those before, one microbatch on, share one row: so the
steady state of a step is a few rows. The page's script expands them.
Nothing is rounded: that is for the script, which prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lynx.cli.explain import relative
from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.job import Job
from megatron_lynx.layers import kind_of
from megatron_lynx.plan import Plan, StagePlan, Window
from megatron_lynx.search.given import graph_of
from megatron_lynx.search.rows import job_facts
from megatron_lynx.simulator import passes as kinds
from megatron_lynx.simulator.memory import peak
from megatron_lynx.simulator.passes import Delta, Pass, Piece
from megatron_lynx.simulator.timeline import Timeline

SCHEMA = 2
"""Version of the data inside the page."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One entry of the page: a plan and its simulated step, or the reason why there is none.

    ``megatron`` tells whether Megatron can do it without lynx.
    """

    name: str
    plan: Plan | None = None
    timeline: Timeline | None = None
    reason: str | None = None
    megatron: bool = False


def page_data(title: str, job: Job, methods: Sequence[Method], measured: Json | None = None) -> Json:
    """Everything that the page shows; ``shown`` is the place of the method to begin with."""
    return {
        "schema": SCHEMA,
        "title": title,
        "job": job_facts(job),
        "kinds": list(kinds.KINDS),
        "streams": list(kinds.STREAMS),
        "owners": list(kinds.OWNERS),
        "regions": region_names(job, [m.plan for m in methods if m.plan]),
        "budget_bytes": job.memory_bytes,
        "methods": [_method(job, method) for method in methods],
        "shown": 0,
        "measured": measured,
    }


def region_names(job: Job, plans: Iterable[Plan]) -> list[str]:
    """Regions of the grid, in forward order: the graph's, and what the plans name beside them.

    The layer's input stands there only if some plan drops it.
    """
    named = {
        region for plan in plans for stage in plan for layer in stage.layers for region, _ in layer.choices
    }
    known = set(job.graph.names) - {INPUT}
    return [name for name in (INPUT, *kind_of(job.model).names) if name in known | named]


def _method(job: Job, method: Method) -> Json:
    plan, timeline = method.plan, method.timeline
    entry: Json = {
        "name": method.name,
        "megatron": method.megatron,
        "fits": plan is not None,
        "reason": method.reason,
        "plan": None if plan is None else _plan(plan, graph_of(job, plan)),
        "timeline": None,
    }
    if plan is None or timeline is None:
        return entry
    most = max(job.footprint(s.stage, len(s.layers)).parameters for s in plan)
    step_ns = timeline.makespan_ns + job.step_ns(most)
    return {
        **entry,
        "iteration_ns": step_ns,
        "optimizer_ns": step_ns - timeline.makespan_ns,
        "tokens": job.tokens,
        "bubble": timeline.bubble(),
        "stages": [_stage(job, timeline, stage) for stage in plan],
        "timeline": _timeline(timeline),
    }


def _plan(plan: Plan, graph: LayerGraph | None) -> Json:
    """The grid. ``saves`` are the regions that have something to keep."""
    return {
        "planner": plan.planner,
        "layout": plan.layout,
        "fingerprint": plan.fingerprint,
        "saves": list(graph.droppable()) if graph else None,
        "stages": [
            {"stage": stage.stage, "layers": [_layer(stage, layer) for layer in _owned(stage)]}
            for stage in plan
        ],
    }


def _owned(stage: StagePlan) -> tuple[int, ...]:
    return tuple(layer for chunk in stage.chunks for layer in chunk)


def _layer(stage: StagePlan, layer: int) -> Json:
    choices = {
        region: {
            "kind": choice.kind if isinstance(choice, Window) else choice,
            "choice": str(choice),
            "words": relative(choice, layer),
        }
        for region, choice in stage.layer(layer).choices
    }
    return {"layer": layer, "choices": choices}


def _stage(job: Job, timeline: Timeline, stage: StagePlan) -> Json:
    top = peak(timeline, stage.stage)
    static = job.footprint(stage.stage, len(stage.layers))
    where = f"layer {top.layer} {top.region}".strip() if top.layer >= 0 else top.region
    return {
        "stage": stage.stage,
        "chunks": [list(chunk) for chunk in stage.chunks],
        "totals_ns": timeline.totals_ns(stage.stage),
        "stall_ns": timeline.stall_ns(stage.stage),
        "static": dict(static.owners()),
        "static_bytes": static.static_bytes,
        "peak": {
            "size_bytes": static.static_bytes + top.size_bytes,
            "at_ns": top.at_ns,
            "action": str(top.action or ""),
            "where": where,
            "owner": top.owner,
            "owners": dict(top.owners),
        },
    }


class _Names:
    """Each string once, in the order of first use."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, name: str) -> int:
        """The place of ``name`` in the table."""
        return self.places.setdefault(name, len(self.places))


_KIND = {kind: i for i, kind in enumerate(kinds.KINDS)}
_STREAM = {stream: i for i, stream in enumerate(kinds.STREAMS)}
_OWNER = {owner: i for i, owner in enumerate(kinds.OWNERS)}


def _timeline(timeline: Timeline) -> Json:
    """``passes``: [early ns, body ns, early pieces, body pieces, early memory, body memory].

    A piece is [stream, kind, start, end, layer, name]; a change of memory [at, bytes, owner]. ``runs``
    are, for each rank, the places of its runs in ``rows``. A row is [forward, chunk, microbatches since the
    last such run, pass, wait from ready to begin, arrival of the gradient after the start as far as early
    work hides in it, delivery after the end]. A transfer takes ``p2p_ns``.
    """
    names, passes = _Names(), list[Json | list[Any]]()
    numbers: dict[int, int] = {}
    alive: list[Pass] = []  # so that no id is used twice
    rows: dict[tuple[int, ...], int] = {}
    runs, p2p_ns = [], 0
    for rank in timeline.runs:
        found, last = list[int](), dict[tuple[int, int], int]()
        for run in rank:
            inside = timeline.inside(run)
            if id(inside) not in numbers:
                numbers[id(inside)] = len(passes)
                alive.append(inside)
                passes.append(_pass(inside, names))
            action, early = run.action, run.ready_ns - run.start_ns
            key = int(action.forward), action.chunk
            since = action.microbatch - last.get(key, -1)
            last[key] = action.microbatch
            hidden = min(early, max(0, run.arrival_ns - run.start_ns))
            delay = run.delivered_ns - run.end_ns
            p2p_ns = max(p2p_ns, run.delivered_ns - run.sent_ns)
            row = (*key, since, numbers[id(inside)], run.begin_ns - run.ready_ns, hidden, delay)
            found.append(rows.setdefault(row, len(rows)))
        runs.append(found)
    return {
        "makespan_ns": timeline.makespan_ns,
        "p2p_ns": p2p_ns,
        "names": list(names.places),
        "passes": passes,
        "rows": list(rows),
        "runs": runs,
    }


def _pass(inside: Pass, names: _Names) -> list[Any]:
    return [
        inside.early_ns,
        inside.body_ns,
        _pieces(inside.early, names),
        _pieces(inside.body, names),
        _memory(inside.early_deltas),
        _memory(inside.body_deltas),
    ]


def _pieces(pieces: Iterable[Piece], names: _Names) -> list[list[int]]:
    return [
        [_STREAM[p.stream], _KIND[p.kind], p.start_ns, p.end_ns, p.layer, names.place(p.name)] for p in pieces
    ]


def _memory(deltas: Iterable[Delta]) -> list[list[int]]:
    return [[d.at_ns, d.size_bytes, _OWNER[d.owner]] for d in deltas]
