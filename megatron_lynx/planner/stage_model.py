"""The program of one stage: a ``Block`` a layer, and the rows that tie the layers together.

The blocks' glossary has the variables; here is what a window holds, and what is alive at a point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from megatron_lynx.plan import Choice, StagePlan, Window
from megatron_lynx.planner.block import Block, Scale, Slot, Term, tidy
from megatron_lynx.planner.milp import HALF_NS_IN_US, Model, Solution
from megatron_lynx.planner.price import candidates, stage_plan
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import SolveOptions

ONE_UNIT = 0.4
"""Where a search for the lowest peak may stop: peaks are whole units."""
ONE_NS = 2 * HALF_NS_IN_US - 1e-4
"""Where a search for the least time may stop, in microseconds: times are whole nanoseconds."""


class StageModel:
    """The program of one stage. With ``budget`` it minimises time, without it the peak.

    ``reach`` limits a layer to its own forward windows and to the backward windows of the next
    ``reach`` layers (and its own): smaller, and rarely worse.
    """

    def __init__(
        self,
        problem: StageProblem,
        options: SolveOptions,
        *,
        budget: bool = True,
        reach: int | None = None,
    ) -> None:
        self.problem, self.options, self.reach = problem, options, reach
        self.model, self.scale = Model(), self._scale()
        self.step = ONE_NS if budget else ONE_UNIT
        self.windows = problem.windows()
        self.forwards = [w for w in self.windows if w.kind == "fwd"]
        self.split = self._passing()
        self.idle = [w for w in self.windows if w.kind in ("stall", "head")]
        self.before = (len(self.forwards) if self.split else 1) + len(self.idle)
        self.blocks = {layer: self._block(layer) for layer in problem.layers}
        self.peak = None if budget else self.model.variable(1.0, upper=math.inf, integer=False)
        if budget:
            for block in self.blocks.values():
                for name in block.names:
                    for variable, factor in block.on_demand(name):
                        self.model.costs[variable] += factor * problem.demand_ns(name) / 1000
        self._capacities(budget)
        self._memory()

    def _scale(self) -> Scale:
        return Scale.of(self.problem)

    def _passing(self) -> bool:
        """Whether memory must be counted before any backward too: only if a storage that no backward
        reads can be rebuilt there, and let go of before the first backward (where else is more)."""
        graph, costs, names = self.problem.graph, self.problem.costs, candidates(self.problem.graph)
        early = [self.problem.capacity_ns(w) for w in self.windows if w.kind != "bwd"]
        longest = max(early, default=0)
        return any(
            not storage.saved_by
            and storage.producer in names
            and set(graph.readers(storage.name)) & set(names)
            and not graph.region(storage.producer).communicates
            and (self.options.soft or costs.rebuild_ns(storage.producer, hidden=False) <= longest)
            for storage in graph.storages
        )

    def _alive(self, block: Block, level: int) -> list[Term]:
        """Units of one layer that are rebuilt and alive at ``level``."""
        return block.alive(level, self.scale)

    def _block(self, layer: int) -> Block:
        """The layer's slots: every window that comes before its backward, in order."""
        chunk = self.problem.chunks[self.problem.chunk_of(layer)]
        slots: list[Slot] = []
        for i, window in enumerate(self.forwards):
            near = self.reach is None or window.layer == layer
            if window.layer in chunk and near:
                slots.append(self._slot(window, i if self.split else 0))
        start = self.before - len(self.idle)
        for i, window in enumerate(self.idle):
            if window.kind == "stall" or self.problem.chunks[-1] is chunk:
                slots.append(self._slot(window, start + i))
        behind = chunk[-1] - layer
        phases = self.problem.phases
        for i, other in enumerate(range(chunk[-1], layer - 1, -1)):
            if self.reach is not None and other > layer + self.reach:
                continue
            for slot in self.problem.backward_slots:
                own = slot.partition(".")[0] if other == layer else ""
                window = Window("bwd", other, slot)
                level = self.before + i * phases + self.problem.phase_of(window)
                slots.append(self._slot(window, level, own))
        levels = self.before + (behind + 1) * phases
        return Block(self.model, self.problem, slots, levels, soft=self.options.soft)

    def _slot(self, window: Window, level: int, own: str = "") -> Slot:
        capacity = self.problem.capacity_ns(window)
        return Slot(window, level, capacity, idle=window.kind == "stall", own=own)

    def _capacities(self, budget: bool) -> None:
        """The work of all layers in one window is at most its capacity (or the excess is paid)."""
        loads: dict[Window, list[Term]] = {}
        for block in self.blocks.values():
            for j, slot in enumerate(block.slots):
                loads.setdefault(cast(Window, slot.key), []).extend(block.load_us(j))
        for window, terms in loads.items():
            if not terms:
                continue
            if self.options.soft:
                price = budget / self.problem.slowdown(window.kind)
                terms.append((self.model.variable(price, upper=math.inf, integer=False), -1.0))
            self.model.row(terms, at_most=self.problem.capacity_ns(window) / 1000 + HALF_NS_IN_US)

    def _memory(self) -> None:
        """Bytes alive at every point at most the budget."""
        problem, scale, phases = self.problem, self.scale, range(self.problem.phases)
        kept = {layer: block.kept(scale) for layer, block in self.blocks.items()}
        flights = {
            layer: count
            for chunk, count in zip(problem.chunks, problem.in_flight, strict=True)
            for layer in chunk
        }
        carried = {k: b.alive(self.before - 1, scale, done=self.before) for k, b in self.blocks.items()}
        for level in range(self.before) if self.split else ():
            terms = [t for k in self.blocks for t in scaled(kept[k][0], flights[k])]
            terms += [t for block in self.blocks.values() for t in self._alive(block, level)]
            self._row(terms, sum(kept[k][1] * flights[k] for k in self.blocks), 0)
        for chunk in problem.chunks:
            for i, (layer, phase) in enumerate((k, p) for k in reversed(chunk) for p in phases):
                terms, constant = self.blocks[layer].kept(scale, phase)
                for k, block in self.blocks.items():
                    count = flights[k] - (k in chunk and k >= layer)
                    terms += scaled(kept[k][0], count)
                    constant += kept[k][1] * count
                    if k not in chunk:
                        terms += carried[k]
                    elif k <= layer:
                        terms += self._alive(block, self.before + i)
                self._row(terms, constant, problem.workspace(phase))

    def _row(self, terms: list[Term], constant: float, extra_bytes: int) -> None:
        if self.peak is not None:
            constant += extra_bytes / self.scale.unit
            self.model.row([*terms, (self.peak, -1.0)], at_most=-constant)
        else:
            room = self.scale.room(self.problem.budget_bytes - extra_bytes)
            self.model.row(terms, at_most=room - constant)

    def solve(
        self, deadline: float, start: StagePlan | None = None, *, enough: float | None = None
    ) -> Solution:
        """Minimise until ``deadline`` (``time.monotonic``), from ``start`` if given.

        ``enough`` is a known lower bound: the search ends where it is reached.
        """
        hint: dict[int, float] = {}
        for plan in start.layers if start else ():
            hint.update(self.blocks[plan.layer].hint(dict(plan.choices)))
        return self.model.solve(
            self.options,
            deadline=deadline,
            absolute_gap=self.step,
            hint=hint or None,
            target=None if enough is None else enough + self.step,
        )

    def plan(self, solution: Solution) -> StagePlan:
        """The stage plan of a solution."""
        made = {
            layer: tidy(self.problem, cast(Mapping[str, Choice], block.choices(solution.values)))
            for layer, block in self.blocks.items()
        }
        return stage_plan(self.problem, made)


def scaled(terms: list[Term], count: int) -> list[Term]:
    """The terms, ``count`` times over."""
    return [(v, f * count) for v, f in terms] if count else []
