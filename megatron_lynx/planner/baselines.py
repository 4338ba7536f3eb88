"""Megatron's own ways to recompute, as plans: none, full (uniform and block), selective, tail-free.

They cost what Megatron's really cost. Full recomputation runs a layer's whole forward again with
every collective, so its plans name every region, also those that no backward needs (``linear_fc2``,
its collective, ``mlp_bda``). Tail-free is full without those. Selective recomputation runs single
modules again (``--recompute-modules``). Of the attention it keeps the output (the next linear saves it)
and drops what is inside, so it is priced by ``megatron_graph``, in which that output does not belong to
the regions that are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from megatron_lynx.errors import ConfigError, InfeasibleError
from megatron_lynx.graph import INPUT, LayerGraph, Region
from megatron_lynx.plan import Choice, StagePlan
from megatron_lynx.planner.price import Pricer, candidates, stage_plan
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import Answer, SolveOptions
from megatron_lynx.units import format_bytes

SELECTIVE = "core_attn"
"""What ``selective`` runs again, by Megatron's ``--recompute-modules``."""


def infeasible(problem: StageProblem, planner: str, needed_bytes: int) -> InfeasibleError:
    """The error that no plan of ``planner`` fits, and the smallest budget with which one would."""
    return InfeasibleError(
        f"stage {problem.stage}: no plan of {planner} fits {format_bytes(problem.budget_bytes)} of "
        f"activations; the smallest budget that would is {format_bytes(needed_bytes)} "
        f"({needed_bytes} bytes)",
        stage=problem.stage,
        budget_bytes=problem.budget_bytes,
        needed_bytes=needed_bytes,
    )


def none(problem: StageProblem, options: SolveOptions) -> Answer:
    """Keep everything."""
    return Answer(plan=stage_plan(problem, {}), status="fixed")


def _whole(graph: LayerGraph) -> dict[str, Choice]:
    return {name: "demand" for name in graph.names if name not in (INPUT, *graph.fixed)}


def uniform(problem: StageProblem, group: int) -> StagePlan:
    """``--recompute-method uniform --recompute-num-layers group``: of every ``group`` layers of a
    chunk only the first one's input is kept."""
    choices: dict[int, dict[str, Choice]] = {}
    for chunk in problem.chunks:
        for i, layer in enumerate(chunk):
            first = i % group == 0
            choices[layer] = _whole(problem.graph) if first else {INPUT: "demand", **_whole(problem.graph)}
    return stage_plan(problem, choices)


def block(problem: StageProblem, count: int) -> StagePlan:
    """``--recompute-method block --recompute-num-layers count``: the first ``count`` layers of
    each chunk are recomputed, one by one."""
    return stage_plan(
        problem,
        {layer: _whole(problem.graph) for chunk in problem.chunks for layer in chunk[:count]},
    )


def full_uniform(problem: StageProblem, options: SolveOptions, group: int | None = None) -> Answer:
    """Full recomputation of groups: ``group`` layers, or the best number.

    All groups cost the same time, so the best is the smallest that fits, and 1 first.
    """
    longest = max((len(chunk) for chunk in problem.chunks), default=1)
    tried = [group] if group else list(range(1, max(1, longest) + 1))
    return _first_that_fits(problem, "full-uniform", [(g, uniform(problem, g)) for g in tried])


def full_block(problem: StageProblem, options: SolveOptions, count: int | None = None) -> Answer:
    """Full recomputation of the first ``count`` layers of each chunk, or of as few as will fit.

    Megatron has one number for all stages: take the largest of the stages' own ``number``.
    """
    longest = max((len(chunk) for chunk in problem.chunks), default=0)
    tried = [count] if count is not None else list(range(longest + 1))
    return _first_that_fits(problem, "full-block", [(k, block(problem, k)) for k in tried])


def _first_that_fits(problem: StageProblem, planner: str, plans: list[tuple[int, StagePlan]]) -> Answer:
    pricer = Pricer(problem)
    peaks = []
    for number, plan in plans:
        peaks.append(pricer.price(plan).peak_bytes)
        if peaks[-1] <= problem.budget_bytes:
            return Answer(plan=plan, status="fixed", number=number)
    raise infeasible(problem, planner, min(peaks))


def megatron_graph(graph: LayerGraph, module: tuple[str, ...]) -> LayerGraph:
    """``graph`` with the output of the regions of ``module`` outside of them, and so kept."""
    split = graph.names.index(module[-1]) + 1
    result = f"{module[-1]}_result"
    regions = (*graph.regions[:split], Region(name=result), *graph.regions[split:])
    storages = tuple(
        replace(s, producer=result)
        if s.producer in module and any(reader not in module for reader in s.saved_by)
        else s
        for s in graph.storages
    )
    return LayerGraph(regions=regions, storages=storages, cuts=graph.cuts, fixed=graph.fixed)


def module_sets(recompute_modules: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Planners of every combination of ``--recompute-modules`` but the one that is ``selective``."""
    names = list(recompute_modules)
    found = [names_ for size in range(1, len(names) + 1) for names_ in combinations(names, size)]
    return tuple(f"modules-{'+'.join(chosen)}" for chosen in found if chosen != (SELECTIVE,))


def modules_of(planner: str) -> tuple[str, ...]:
    """What a planner gives ``--recompute-modules``; nothing if it is another one."""
    if planner == "selective":
        return (SELECTIVE,)
    _, given, names = planner.rpartition("modules-")
    return tuple(names.split("+")) if given else ()


def plan_graph(
    graph: LayerGraph, recompute_modules: Mapping[str, tuple[str, ...]], planner: str
) -> LayerGraph:
    """The graph that a planner's plans are counted by: its own where it runs the attention again."""
    attention = recompute_modules.get(SELECTIVE, ()) if SELECTIVE in modules_of(planner) else ()
    return megatron_graph(graph, attention) if attention else graph


def selective(problem: StageProblem, options: SolveOptions) -> Answer:
    """``--recompute-granularity selective``: run the attention again, keep its output.

    Raises:
        ConfigError: the layer has no such module.
    """
    return chosen_modules(problem, "selective")


def chosen_modules(problem: StageProblem, planner: str) -> Answer:
    """``--recompute-granularity selective --recompute-modules``: run single modules again.

    Raises:
        ConfigError: the layer has no such module.
    """
    regions: list[str] = []
    for name in modules_of(planner):
        if name not in problem.recompute_modules:
            known = ", ".join(problem.recompute_modules) or "none"
            raise ConfigError(
                f"--planner {planner} needs a layer with {name}; its modules: {known}; opt works"
            )
        regions += (n for n in problem.recompute_modules[name] if n not in problem.graph.fixed)
    again: dict[str, Choice] = dict.fromkeys(regions, "demand")
    plan = stage_plan(problem, dict.fromkeys(problem.layers, again))
    graph = plan_graph(problem.graph, problem.recompute_modules, planner)
    return Answer(plan=plan, status="fixed", graph=graph)


def tail_free(problem: StageProblem, options: SolveOptions) -> Answer:
    """Full recomputation that stops at the last storage a backward reads."""
    return Answer(plan=everything_on_demand(problem), status="fixed")


def everything_on_demand(problem: StageProblem) -> StagePlan:
    """Drop all that some backward reads, but the inputs of layers."""
    again: dict[str, Choice] = dict.fromkeys(candidates(problem.graph), "demand")
    return stage_plan(problem, dict.fromkeys(problem.layers, again))
