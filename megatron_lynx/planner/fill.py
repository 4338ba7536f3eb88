"""Filling the stall: what a plan rebuilds on demand is rebuilt while the rank waits for a gradient.

A planner sees the wait of the steady state, and where the stages are balanced there is none. Before
the first backward and in the cooldown all stages but the last wait all the same. Work in the stall
begins as soon as the rank is free, and where it is free no sooner than the gradient is there, the
work takes as long as on demand. So to move work from on demand into the stall never makes a step
longer. It takes memory: what is rebuilt in the stall is alive from there on, what is rebuilt on
demand from the phase in which it is needed.

The rule: a region that some backward reads may be moved, together with the regions on demand that
it runs again from. What no backward reads goes with its reader or stays, since to hold it for a
reader on demand would take memory for little; so regions that nobody needs stay too. Not moved are
collectives, what reads the result of one on demand or that of a later window, and anything in a plan
that drops inputs of layers: there one layer's backward runs others again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.plan import DEMAND, Choice, StagePlan, Window
from megatron_lynx.planner.judge import judged
from megatron_lynx.planner.price import Pricer, stage_plan
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import PlannedStage

STALL = Window("stall")


def filled(problem: StageProblem, planned: PlannedStage) -> PlannedStage:
    """``planned`` with its stall filled, priced and verified; itself where nothing can be moved.

    The problem has a stall, if only one of 0 ns in the steady state; what is over its length is paid on
    the critical path, as on demand.

    Raises:
        PlanError: ``verify`` refuses the result (an error of ours; the timeline shows where).
    """
    started, graph, report = time.perf_counter_ns(), planned.graph, planned.report
    plan = fill_stall(problem, planned.plan, graph)
    if plan == planned.plan:
        return planned
    price = Pricer(problem, graph).price(plan)
    bound = report.bound_ns
    if bound is not None and bound > price.exposed_ns:
        bound = None  # it was for plans that keep to their windows, and this one overruns the stall
    found = judged(
        problem,
        plan,
        graph,
        price,
        who="filling the stall",
        planner=report.planner,
        status="heuristic" if bound is None else report.status,
        bound_ns=bound,
        soft=True,
        started_ns=started - report.wall_ns,
    )
    return replace(found, filled=True)


def fill_stall(problem: StageProblem, plan: StagePlan, graph: LayerGraph | None = None) -> StagePlan:
    """``plan`` with what fits the budget moved from on demand into the stall, in the chunks that wait for
    a gradient.

    The layers are filled in the order of their backward passes: what is rebuilt for the first of
    them is soon released. Of a layer all that may be moved, or where that does not fit, region by
    region in forward order. What is dropped stays the same.
    """
    if any(INPUT in layer.dropped for layer in plan.layers):
        return plan
    graph = graph or problem.graph
    pricer = Pricer(problem, graph)
    made = {layer.layer: dict(layer.choices) for layer in plan.layers}
    held = {layer: pricer.layer(layer, choices).memory for layer, choices in made.items()}
    total = sum(held.values(), start=pricer.workspaces)
    for layer in problem.backward_order:
        if not problem.turns[problem.chunk_of(layer)].waits:
            continue
        movable = _movable(graph, made[layer])
        whole = frozenset[str]().union(*movable)
        for regions in (whole, *movable):
            if all(made[layer][name] == STALL for name in regions):
                continue
            moved = {n: STALL if n in regions else choice for n, choice in made[layer].items()}
            later = pricer.layer(layer, moved).memory
            changed = total - held[layer] + later
            if int(changed.max()) <= problem.budget_bytes:
                made[layer], held[layer], total = moved, later, changed
    return stage_plan(problem, made)


def _movable(graph: LayerGraph, choices: Mapping[str, Choice]) -> list[frozenset[str]]:
    """What may be moved only together: a region that some backward reads, and those on demand that
    it runs again from."""
    found = []
    for name in graph.names:
        if choices.get(name) == DEMAND and any(s.saved_by for s in graph.produced_by(name)):
            regions = _with_sources(graph, choices, name)
            if regions is not None:
                found.append(regions)
    return found


def _with_sources(graph: LayerGraph, choices: Mapping[str, Choice], name: str) -> frozenset[str] | None:
    """``name`` and the regions on demand that it runs again from; None if one of them cannot run in
    the stall."""
    if graph.region(name).communicates:
        return None
    found = frozenset({name})
    for source in graph.inputs_of(name):
        choice = choices.get(source)
        if choice == DEMAND:
            more = _with_sources(graph, choices, source)
            if more is None:
                return None
            found |= more
        elif isinstance(choice, Window) and choice.kind in ("bwd", "head"):
            return None
    return found
