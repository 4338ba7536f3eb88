"""The only place that talks to the solver (HiGHS, through ``highspy``).

A ``Model`` is variables in [0, upper] and rows of linear terms; ``solve`` minimises. Times go in as
microseconds and sizes in a unit near a megabyte: rows in bytes have made HiGHS call a plan six times
too dear optimal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np

from megatron_lynx.planner.result import SolveOptions

Terms = Iterable[tuple[int, float]]
HALF_NS_IN_US = 0.0005
"""Slack of a row of integer nanoseconds: a sum that is over is over by twice as much."""

PLAIN_SEARCH = {
    "presolve": "off",
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_detect_symmetry": False,
    "mip_allow_restart": False,
}
"""For a model of one policy, a hundred variables or so: two thirds of its time went into preparing for
what the first relaxations give."""


@dataclass(frozen=True, slots=True)
class Solution:
    """``status`` is ``optimal``, ``limit`` (values are the best found) or ``infeasible``; with
    ``limit`` and no values, nothing was found. ``bound`` is a proven lower bound."""

    status: str
    values: tuple[float, ...]
    objective: float
    bound: float


@dataclass(slots=True)
class Model:
    """Minimise ``costs`` . x subject to rows; x in [0, upper], integer where said."""

    costs: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    integers: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, upper: float = 1.0, integer: bool = True) -> int:
        """A new variable; returns its number."""
        self.costs.append(cost)
        self.uppers.append(upper)
        self.integers.append(integer)
        return len(self.costs) - 1

    def row(self, terms: Terms, *, at_least: float = -math.inf, at_most: float = math.inf) -> None:
        """Bound a linear expression; terms of the same variable add up."""
        merged: dict[int, float] = {}
        for column, factor in terms:
            merged[column] = merged.get(column, 0.0) + factor
        self.columns += [c for c, f in merged.items() if f]
        self.factors += [f for f in merged.values() if f]
        self.starts.append(len(self.columns))
        self.lows.append(at_least)
        self.highs.append(at_most)

    def _lp(self) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.costs), len(self.lows)
        lp.col_cost_ = np.array(self.costs)
        lp.col_lower_ = np.zeros(lp.num_col_)
        lp.col_upper_ = np.array(self.uppers)
        lp.row_lower_, lp.row_upper_ = np.array(self.lows), np.array(self.highs)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[i] for i in self.integers]
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self.starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(self.columns, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self.factors)
        return lp

    def solve(
        self,
        options: SolveOptions,
        *,
        deadline: float | None = None,
        absolute_gap: float = 2 * HALF_NS_IN_US - 1e-4,
        hint: Mapping[int, float] | None = None,
        target: float | None = None,
        plain: bool = False,
    ) -> Solution:
        """Minimise. ``deadline`` is a ``time.monotonic`` instant, ``hint`` values of the integer
        variables in a known solution, ``target`` an objective that is good enough to stop at;
        ``plain`` suits a small model.

        HiGHS 1.16 may improve a hint while it presolves, report the better objective, and hand the
        hint's values back. So the objective is computed again, and if it differs, the model is
        solved once more without the hint.
        """
        if not self.costs:  # HiGHS does not look at the rows of a model without columns
            self.variable()
        highs = _solver(options, deadline)
        highs.setOptionValue("mip_abs_gap", absolute_gap)
        if plain:
            for option, value in PLAIN_SEARCH.items():
                highs.setOptionValue(option, value)
        if target is not None:
            highs.setOptionValue("objective_target", target)
        highs.passModel(self._lp())
        if hint is not None:
            places = np.array(list(hint), dtype=np.int32)
            highs.setSolution(len(places), places, np.array(list(hint.values())))
        highs.run()
        found = self._read(highs)
        claimed = highs.getInfo().objective_function_value
        if hint is None or not found.values or abs(claimed - found.objective) <= absolute_gap / 2:
            return found
        again = self.solve(options, deadline=deadline, absolute_gap=absolute_gap, target=target)
        return again if again.objective < found.objective else found

    def _read(self, highs: Any) -> Solution:
        status, info = highs.getModelStatus(), highs.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solution("infeasible", (), math.inf, math.inf)
        bound = float(info.mip_dual_bound)
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Solution("limit", (), math.inf, bound)
        values = np.array(highs.getSolution().col_value)
        objective = float(values @ np.array(self.costs))
        done = status == highspy.HighsModelStatus.kOptimal
        return Solution("optimal" if done else "limit", tuple(values.tolist()), objective, bound)


def _solver(options: SolveOptions, deadline: float | None) -> Any:
    """A silent HiGHS. (Its public class registers callbacks, which prints a banner on stdout.)"""
    highs = highspy._core._Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", options.threads)
    highs.setOptionValue("random_seed", options.seed)
    highs.setOptionValue("mip_rel_gap", options.relative_gap)
    left = math.inf if deadline is None else max(0.05, deadline - time.monotonic())
    highs.setOptionValue("time_limit", left)
    return highs
