"""Planners: from a StageProblem to a StagePlan.

``plan`` runs one of ``PLANNERS``, prices its answer in integer nanoseconds and bytes, and hands it to
``verify`` before anybody sees it.
"""

from __future__ import annotations

import re
import time

from megatron_lynx.errors import ConfigError, InfeasibleError
from megatron_lynx.planner.adapipe import adapipe
from megatron_lynx.planner.baselines import (
    chosen_modules,
    full_block,
    full_uniform,
    infeasible,
    none,
    selective,
    tail_free,
)
from megatron_lynx.planner.checkmate import checkmate
from megatron_lynx.planner.greedy import windows
from megatron_lynx.planner.heu import heu
from megatron_lynx.planner.judge import judged
from megatron_lynx.planner.opt import mixed, opt
from megatron_lynx.planner.price import Pricer
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import Answer, PlannedStage, Planner, SolveOptions
from megatron_lynx.planner.verify import Violation, verify

__all__ = [
    "PLANNERS",
    "PlannedStage",
    "SolveOptions",
    "SolveReport",
    "StageProblem",
    "Violation",
    "plan",
    "verify",
]

PLANNERS: dict[str, Planner] = {
    "none": none,
    "full-uniform": full_uniform,
    "full-block": full_block,
    "selective": selective,
    "tail-free": tail_free,
    "checkmate": checkmate,
    "adapipe": adapipe,
    "windows": windows,
    "heu": heu,
    "mixed": mixed,
    "opt": opt,
}
"""Every planner by name. ``full-uniform-G`` and ``full-block-K`` are understood as well, without a number
the best one is taken; and ``modules-A+B``, with the names of ``--recompute-modules``."""

_NUMBERED = {"full-uniform": full_uniform, "full-block": full_block}


def plan(problem: StageProblem, planner: str = "opt", options: SolveOptions | None = None) -> PlannedStage:
    """Plan one stage: solve, price, verify.

    Raises:
        ConfigError: no planner of that name.
        InfeasibleError: nothing that the planner may choose fits the budget.
        PlanError: ``verify`` refuses the answer (an error of ours; the timeline shows where).
    """
    options = options or SolveOptions()
    started = time.perf_counter_ns()
    offered = options.restrict(problem)
    try:
        answer = _solve(offered, planner, options)
    except InfeasibleError as error:
        if error.needed_bytes >= offered.step_bytes:
            raise
        raise infeasible(problem, planner, offered.step_bytes) from error
    price = Pricer(offered, answer.graph).price(answer.plan)
    if answer.status == "fixed" and price.peak_bytes > problem.budget_bytes:
        raise infeasible(problem, planner, price.peak_bytes)
    if offered.step_bytes > offered.budget_bytes:
        raise infeasible(problem, planner, offered.step_bytes)
    name = planner if answer.number is None else f"{planner.rstrip('-0123456789')}-{answer.number}"
    return judged(
        offered,
        answer.plan,
        answer.graph or problem.graph,
        price,
        who=f"planner {planner}",
        planner=name,
        status=answer.status,
        bound_ns=answer.bound_ns,
        soft=options.soft,
        started_ns=started,
    )


def _solve(problem: StageProblem, planner: str, options: SolveOptions) -> Answer:
    numbered = re.fullmatch(r"(full-uniform|full-block)-(\d+)", planner)
    if numbered:
        number = int(numbered.group(2))
        if numbered.group(1) == "full-uniform" and number < 1:
            raise ConfigError(
                f"--lynx-planner {planner}: a group has at least one layer; full-uniform-1 works"
            )
        return _NUMBERED[numbered.group(1)](problem, options, number)
    if planner.startswith("modules-"):
        return chosen_modules(problem, planner)
    if planner not in PLANNERS:
        known = ", ".join(PLANNERS)
        raise ConfigError(
            f"--lynx-planner {planner!r} is unknown; known are {known}, full-uniform-G, full-block-K"
        )
    return PLANNERS[planner](problem, options)
