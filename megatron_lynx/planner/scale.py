"""Memory in the programs: units of bytes that a solver adds up exactly, and rows of what is alive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lynx.planner.milp import HALF_NS_IN_US, Model
from megatron_lynx.planner.problem import StageProblem

Term = tuple[int, float]
"""A variable and its factor."""
ONE_UNIT = 0.4
"""Where a search for the lowest peak may stop: peaks are whole units."""
ONE_NS = 2 * HALF_NS_IN_US - 1e-4
"""Where a search for the least time may stop, in microseconds: times are whole nanoseconds."""
LARGEST_INTEGER = 1 << 27
"""Sums of units up to this are exact in the solver's arithmetic with room to spare."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Bytes per unit of the memory rows.

    All sizes are multiples of their greatest common divisor, so a row in that unit is whole and
    half a unit of slack lets nothing in that does not fit. If that makes sums too large for the
    solver's tolerance, the unit is coarser, ``exact`` False, and sizes are rounded: up, so that
    what the solver finds fits, or ``down`` for a bound.
    """

    unit: int
    exact: bool
    down: bool = False

    @classmethod
    def of(cls, problem: StageProblem, *, down: bool = False) -> Scale:
        """The unit for ``problem``'s storages."""
        sizes = [s.size_bytes for s in problem.graph.storages]
        unit = math.gcd(*sizes) or 1
        total = sum(sizes) * max(1, problem.most_layers())
        if total // unit <= LARGEST_INTEGER:
            return cls(unit, True, down)
        return cls(-(-total // LARGEST_INTEGER), False, down)

    def size(self, size_bytes: int) -> float:
        """A storage's size in units."""
        return float(size_bytes // self.unit if self.down else -(-size_bytes // self.unit))

    def room(self, budget_bytes: int) -> float:
        """What a row may add up to, with half a unit of slack where that lets nothing in."""
        return math.floor(budget_bytes / self.unit) + (0.5 if self.exact or self.down else 0.0)


class Memory:
    """Rows of what is alive at points of a program: at most the budget, or, without ``budget``, at most
    a peak in units of ``scale``, which is to be minimised."""

    def __init__(self, model: Model, problem: StageProblem, scale: Scale, *, budget: bool) -> None:
        self.model, self.scale = model, scale
        self.budget_bytes = problem.budget_bytes
        self.peak = None if budget else model.variable(1.0, upper=math.inf, integer=False)

    def row(self, terms: Sequence[Term], constant: float, extra_bytes: int) -> None:
        """Terms and a constant in units, and ``extra_bytes``."""
        if self.peak is None:
            room = self.scale.room(self.budget_bytes - extra_bytes)
            self.model.row(terms, at_most=room - constant)
        else:
            constant += extra_bytes / self.scale.unit
            self.model.row([*terms, (self.peak, -1.0)], at_most=-constant)


def scaled(terms: Sequence[Term], count: int) -> list[Term]:
    """The terms, ``count`` times over."""
    return [(v, f * count) for v, f in terms] if count else []
