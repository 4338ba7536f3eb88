"""Hypothesis strategies: random layers, their costs, and stages made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_lynx.cost import LayerCosts
from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.schedule import Turn
from tests.support import brute_force

T = TypeVar("T")
TOO_LONG_NS = 1000
"""Longer than any window that is drawn."""


@st.composite
def graphs(draw: st.DrawFn, most_regions: int = 10) -> LayerGraph:
    """A layer of up to ``most_regions`` regions, its input included."""
    number = draw(st.integers(1, most_regions - 1))
    names = [INPUT, *(f"r{i}" for i in range(1, number + 1))]
    storages = [Storage(name="input", producer=INPUT, size_bytes=draw(st.integers(1, 9)), saved_by=("r1",))]
    regions = [Region(name=INPUT)]
    for i, name in enumerate(names[1:], start=1):
        earlier = [s.name for s in storages]
        if draw(st.booleans()):
            reads = [storages[-1].name]
        else:
            reads = draw(st.lists(st.sampled_from(earlier), max_size=2, unique=True))
        regions.append(
            Region(name=name, reads=tuple(reads), communicates=draw(st.sampled_from([False, False, True])))
        )
        for j in range(draw(st.sampled_from([1, 1, 1, 2]))):
            savers = draw(st.lists(st.sampled_from(names[i:]), max_size=2, unique=True))
            storages.append(
                Storage(
                    name=f"{name}.{j}",
                    producer=name,
                    size_bytes=draw(st.integers(1, 20)),
                    saved_by=tuple(sorted(savers, key=names.index)),
                )
            )
    cuts = draw(st.lists(st.sampled_from(names[1:]), max_size=2, unique=True))
    cuts.sort(key=names.index, reverse=True)
    return LayerGraph(regions=tuple(regions), storages=tuple(storages), cuts=tuple(cuts))


@st.composite
def turns(draw: st.DrawFn, chunks: int, chunk: int) -> Turn:
    """The turn of one of several chunks: its own microbatch is alive, and any of the others'."""
    counts = [st.integers(1 if other == chunk else 0, 4) for other in range(chunks)]
    moments = draw(st.lists(st.tuples(*counts), min_size=1, max_size=1 if chunks == 1 else 2, unique=True))
    return Turn(
        moments=tuple(moments), served=draw(st.booleans()), waits=draw(st.sampled_from([True, True, False]))
    )


@st.composite
def stage_problems(
    draw: st.DrawFn,
    most_regions: int = 10,
    most_layers: int = 2,
    most_plans: int = 1500,
    soft: bool = False,
) -> StageProblem:
    """A stage whose layers have at most ``most_plans`` plans each; its budget lies anywhere from
    just too small to ample. All windows of one kind have one length, as in a real stage. ``soft``: so few
    plans also where windows may be overrun."""
    graph = draw(graphs(most_regions))
    names = list(graph.names[1:])
    forward = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    backward = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    times = {name: draw(st.integers(0, 30)) for name in names}
    collectives = {f"fwd:{name}": draw(st.integers(0, 40)) for name in names}
    collectives |= {f"bwd:{name}": draw(st.integers(0, 40)) for name in backward}
    layers = draw(st.integers(1, most_layers))
    split = layers > 1 and draw(st.sampled_from([False, False, True]))
    chunks = ((0,), tuple(range(1, layers))) if split else (tuple(range(layers)),)
    problem = StageProblem(
        stage=draw(st.integers(0, 3)),
        chunks=chunks,
        graph=graph,
        costs=LayerCosts(
            forward_ns=times,
            dgrad_ns=times,
            wgrad_ns={},
            collective_ns=collectives,
            contention=draw(st.sampled_from([1.0, 1.0, 1.25])),
        ),
        turns=tuple(draw(turns(len(chunks), chunk)) for chunk in range(len(chunks))),
        budget_bytes=0,
        forward_slots=tuple(sorted(forward, key=names.index)),
        backward_slots=tuple(sorted(backward, key=names.index, reverse=True)),
        stall_ns=draw(st.sampled_from([0, 0, 15, 40])),
        has_stall=draw(st.booleans()),
        head_ns=draw(st.sampled_from([0, 0, 25])),
        workspace_bytes=tuple(draw(st.integers(0, 10)) for _ in range(3)),
        head_bytes=draw(st.sampled_from([0, 0, 5, 40])),
        embedding_bytes=draw(st.sampled_from([0, 0, 5, 40])),
    )
    if soft:
        assume(brute_force.count(problem, soft=True) <= most_plans)
    problem = _limited(problem, most_plans)
    kept = graph.kept_bytes() * problem.most_layers()
    share = draw(st.floats(0.2, 1.05))
    extra = max(*problem.workspace_bytes, problem.head_bytes, problem.embedding_bytes)
    return replace(problem, budget_bytes=int(kept * share) + extra)


def _limited(problem: StageProblem, most_plans: int) -> StageProblem:
    """Make regions too long for any window, last ones first, until few enough plans are left."""
    times = dict(problem.costs.forward_ns)
    for name in reversed(list(times)):
        if brute_force.count(problem) <= most_plans:
            break
        times[name] = TOO_LONG_NS
        problem = replace(problem, costs=replace(problem.costs, forward_ns=times))
    return problem


def drawn_for_layers(layer: st.SearchStrategy[T], layers: int, count: int) -> list[dict[int, T]]:
    """``count`` examples of a ``layer`` for each of ``layers``, the last that Hypothesis draws: the first are
    its simplest."""
    drawn: list[dict[int, T]] = []

    @settings(max_examples=4 * count, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.fixed_dictionaries(dict.fromkeys(range(layers), layer)))
    def draw(example: dict[int, T]) -> None:
        drawn.append(example)

    draw()
    return drawn[-count:]
