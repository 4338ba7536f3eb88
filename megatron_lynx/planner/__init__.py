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
    "check_planner",
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


_NAME = re.compile(r"(full-uniform|full-block)-(\d+)")


def check_planner(name: str) -> None:
    """Check that there is a planner called ``name``.

    Raises:
        ConfigError: there is none, or its number says nothing.
    """
    numbered = _NAME.fullmatch(name)
    if numbered and numbered.group(1) == "full-uniform" and int(numbered.group(2)) < 1:
        raise ConfigError(f"--planner {name}: a group has at least one layer; full-uniform-1 works")
    if not numbered and name not in PLANNERS and not name.startswith("modules-"):
        known = ", ".join(PLANNERS)
        raise ConfigError(f"--planner {name!r} is unknown; known are {known}, full-uniform-G, full-block-K")


def _solve(problem: StageProblem, planner: str, options: SolveOptions) -> Answer:
    check_planner(planner)
    numbered = _NAME.fullmatch(planner)
    if numbered:
        return _NUMBERED[numbered.group(1)](problem, options, int(numbered.group(2)))
    if planner.startswith("modules-"):
        return chosen_modules(problem, planner)
    return PLANNERS[planner](problem, options)
