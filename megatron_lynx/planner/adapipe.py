"""AdaPipe-like: a knapsack of units per stage, without overlap (ASPLOS 2024, 10.1145/3620666.3651359).

A unit is a region with what it alone reads and no backward saves; a unit is either saved or recomputed,
in any number of a stage's layers. What ends in a collective is always saved, as AdaPipe saves the outputs
of attention and MLP; a unit that reads it, or what another unit makes, finds it kept or recomputed first.
As there, memory is what is saved, once per microbatch in flight, plus a buffer for recomputing one whole
layer: the knapsack sees no more of the backward pass than that. The other half of AdaPipe, the balance of
stages, is the partitioner's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from megatron_lynx.plan import Choice, StagePlan
from megatron_lynx.planner.baselines import infeasible
from megatron_lynx.planner.milp import Model
from megatron_lynx.planner.price import Pricer, candidates, stage_plan
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import Answer, SolveOptions
from megatron_lynx.planner.scale import Scale


@dataclass(frozen=True, slots=True)
class Unit:
    """``regions`` are rebuilt together; ``saved_bytes`` a saved unit holds per microbatch."""

    regions: tuple[str, ...]
    saved_bytes: int
    again_ns: int


def adapipe(problem: StageProblem, options: SolveOptions) -> Answer:
    """Save the units that buy most time, in as many layers as fit."""
    pricer, plain = Pricer(problem), stage_plan(problem, {})
    most = pricer.price(plain).peak_bytes
    if most <= problem.budget_bytes:
        return Answer(plan=plain, status="heuristic")
    units = adapipe_units(problem)
    least = pricer.price(_plan(problem, units, [0] * len(units))).peak_bytes
    if least > problem.budget_bytes:
        raise infeasible(problem, "adapipe", min(least, most))
    room = problem.budget_bytes - least
    while room > 0:
        found = _plan(problem, units, _knapsack(problem, units, options, room))
        over = pricer.price(found).peak_bytes - problem.budget_bytes
        if over <= 0:
            return Answer(plan=found, status="heuristic")
        room -= over  # saved units take more in a layer's own backward than the knapsack sees
    return Answer(plan=_plan(problem, units, [0] * len(units)), status="heuristic")


def adapipe_units(problem: StageProblem) -> tuple[Unit, ...]:
    """Units of one layer, in forward order."""
    graph, names = problem.graph, candidates(problem.graph)
    found, taken = [], set[str]()
    for name in names:
        made = graph.produced_by(name)
        if not any(s.saved_by for s in made):
            continue
        # Another unit may need to read what no backward does: then a saved unit holds that too.
        held = [s for s in made if s.saved_by or set(graph.readers(s.name)) & set(names)]
        stored = sum(s.size_bytes for s in held)
        group, queue = [name], [name]
        while queue:
            for source in graph.inputs_of(queue.pop()):
                plain = not any(s.saved_by for s in graph.produced_by(source))
                own = plain and source not in taken and not graph.region(source).communicates
                if source in names and own and source not in group:
                    group.append(source)
                    queue.append(source)
        if graph.region(name).communicates or name in taken:
            continue
        taken |= set(group)
        cost = sum(problem.demand_ns(n) for n in group)
        found.append(Unit(tuple(n for n in graph.names if n in group), stored, cost))
    return tuple(found)


def _knapsack(
    problem: StageProblem, units: tuple[Unit, ...], options: SolveOptions, room_bytes: int
) -> list[int]:
    """In how many layers to save each unit: most time bought within ``room_bytes``.

    Layers are counted per chunk, for their in-flight microbatches differ; the last ones first.
    """
    model, scale = Model(), Scale.of(problem)
    moments = {moment for turn in problem.turns for moment in turn.moments}
    rows: dict[tuple[int, ...], list[tuple[int, float]]] = {moment: [] for moment in moments}
    variables = []
    for unit in units:
        variables.append(
            [model.variable(-unit.again_ns / 1000, upper=len(chunk)) for chunk in problem.chunks]
        )
        for moment, terms in rows.items():
            size = scale.size(unit.saved_bytes)
            terms += [(v, size * count) for v, count in zip(variables[-1], moment, strict=True)]
    for terms in rows.values():
        model.row(terms, at_most=scale.room(room_bytes))
    solution = model.solve(options, deadline=time.monotonic() + options.time_limit_s)
    values = solution.values or (0.0,) * len(model.costs)
    return [round(values[v]) for row in variables for v in row]


def _plan(problem: StageProblem, units: tuple[Unit, ...], saved: list[int]) -> StagePlan:
    """Units saved in the last layers of each chunk, recomputed in the others.

    ``saved`` has one number for each unit and chunk, or for each unit.
    """
    per_chunk = len(problem.chunks) if len(saved) == len(units) * len(problem.chunks) else 1
    choices: dict[int, dict[str, Choice]] = {layer: {} for layer in problem.layers}
    for u, unit in enumerate(units):
        for c, chunk in enumerate(problem.chunks):
            number = saved[u * per_chunk + min(c, per_chunk - 1)]
            for layer in chunk[: len(chunk) - number]:
                choices[layer].update(dict.fromkeys(unit.regions, "demand"))
    return stage_plan(problem, choices)
