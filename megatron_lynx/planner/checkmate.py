"""Checkmate: optimal recomputation without overlap (arXiv 1910.02653), on this problem.

The same program as ``opt`` with every window closed: what is dropped is rebuilt on demand. The
difference between the two is what the windows are worth, and only that.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.planner.baselines import infeasible
from megatron_lynx.planner.opt import opt
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import Answer, SolveOptions


def checkmate(problem: StageProblem, options: SolveOptions) -> Answer:
    """The best plan that uses no window."""
    closed = replace(options, forward=False, backward=False, stall=False, head=False)
    try:
        return opt(closed.restrict(problem), closed)
    except InfeasibleError as error:
        raise infeasible(problem, "checkmate", error.needed_bytes) from error
