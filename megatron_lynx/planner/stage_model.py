"""The program of one stage: a ``Block`` a layer, and the rows that tie the layers together.

The blocks' glossary has the variables; here is what a window holds, and what is alive at a point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from megatron_lynx.plan import Choice, StagePlan, Window
from megatron_lynx.planner.block import Block, Slot, passes_early, tidy
from megatron_lynx.planner.milp import HALF_NS_IN_US, Model, Solution
from megatron_lynx.planner.price import Load, stage_plan
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import SolveOptions
from megatron_lynx.planner.scale import ONE_NS, ONE_UNIT, Memory, Scale, Term, scaled

Counts = dict[tuple[int, str], int]
"""By chunk and region, a number of layers."""


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
        self.model, self.scale = Model(), Scale.of(problem)
        self.step = ONE_NS if budget else ONE_UNIT
        numbers = range(len(problem.chunks))
        every = [problem.windows(chunk) for chunk in numbers]
        self.forwards = [[w for w in windows if w.kind == "fwd"] for windows in every]
        self.idle = [[w for w in windows if w.kind in ("stall", "head")] for windows in every]
        self.split = passes_early(problem, soft=options.soft)
        self.before = [
            (len(self.forwards[c]) if self.split and self.forwards[c] else 1) + len(self.idle[c])
            for c in numbers
        ]
        """Levels of each chunk before any backward."""
        self.blocks = {layer: self._block(layer) for layer in problem.layers}
        self.memory = Memory(self.model, problem, self.scale, budget=budget)
        if budget:
            for block in self.blocks.values():
                block.pay_demand()
        self._capacities(budget)
        self._memory()

    def _block(self, layer: int) -> Block:
        """The layer's slots: every window that comes before its backward, in order."""
        number = self.problem.chunk_of(layer)
        chunk, before = self.problem.chunks[number], self.before[number]
        slots: list[Slot] = []
        for i, window in enumerate(self.forwards[number]):
            if self.reach is None or window.layer == layer:
                slots.append(self._slot(window, i if self.split else 0))
        start = before - len(self.idle[number])
        slots += [self._slot(window, start + i) for i, window in enumerate(self.idle[number])]
        behind = chunk[-1] - layer
        phases = self.problem.phases
        for i, other in enumerate(range(chunk[-1], layer - 1, -1)):
            if self.reach is not None and other > layer + self.reach:
                continue
            for slot in self.problem.backward_slots:
                own = slot.partition(".")[0] if other == layer else ""
                window = Window("bwd", other, slot)
                level = before + i * phases + self.problem.phase_of(window)
                slots.append(self._slot(window, level, own))
        levels = before + (behind + 1) * phases
        return Block(self.model, self.problem, slots, levels, self.scale, soft=self.options.soft)

    def _slot(self, window: Window, level: int, own: str = "") -> Slot:
        capacity = self.problem.capacity_ns(window)
        return Slot(window, level, capacity, idle=window.kind == "stall", own=own)

    def _capacities(self, budget: bool) -> None:
        """The work of all layers in one window is at most its capacity (or the excess is paid)."""
        loads: dict[Load, list[Term]] = {}
        for layer, block in self.blocks.items():
            chunk = self.problem.chunk_of(layer)
            for j, slot in enumerate(block.slots):
                loads.setdefault((chunk, cast(Window, slot.key)), []).extend(block.load_us(j))
        for (_, window), terms in loads.items():
            if not terms:
                continue
            if self.options.soft:
                price = budget / self.problem.slowdown(window.kind)
                terms.append((self.model.variable(price, upper=math.inf, integer=False), -1.0))
            self.model.row(terms, at_most=self.problem.capacity_ns(window) / 1000 + HALF_NS_IN_US)

    def _memory(self) -> None:
        """Bytes alive at every point at most the budget."""
        phases = range(self.problem.phases)
        for number, (chunk, turn) in enumerate(zip(self.problem.chunks, self.problem.turns, strict=True)):
            before = self.before[number]
            points: list[tuple[int, int | None, int]] = []
            if self.split or not chunk:
                points += [(level, None, 0) for level in range(before)]
            self._moments(number)
            backward = ((layer, phase) for layer in reversed(chunk) for phase in phases)
            points += [(level, layer, phase) for level, (layer, phase) in enumerate(backward, start=before)]
            for level, layer, phase in points:
                waiting = [k for k in chunk if layer is None or k <= layer]
                rebuilt = [term for k in waiting for term in self.blocks[k].alive(level)]
                for moment in turn.moments:
                    self._point(moment, number, layer, phase, rebuilt)

    def _moments(self, number: int) -> None:
        """The head before the backward of chunk ``number``, and the embedding after it, if they are here."""
        chunk, before = self.problem.chunks[number], self.before[number]
        ending, beginning = self.problem.ending(number), self.problem.beginning(number)
        forward = before - len(self.idle[number])
        levels = [(forward - 1, forward), *((level, level) for level in range(forward, before))]
        for moment in self.problem.turns[number].moments:
            for level, done in levels if ending else ():
                terms, constant = self._kept(moment)
                terms += [term for k in chunk for term in self.blocks[k].alive(level, done=done)]
                self.memory.row(terms, constant, ending)
            if beginning:
                terms, constant = self._kept(moment, number, chunk[0] if chunk else 0)
                self.memory.row(terms, constant, beginning)

    def _kept(
        self, moment: tuple[int, ...], number: int = -1, first: int | None = None
    ) -> tuple[list[Term], float]:
        """Kept units at a moment, those of the layers of chunk ``number`` from ``first`` on once less."""
        terms, constant = list[Term](), 0.0
        for other, (layers, alive) in enumerate(zip(self.problem.chunks, moment, strict=True)):
            for k in layers:
                over = first is not None and other == number and k >= first
                kept, fixed = self.blocks[k].kept()
                terms += scaled(kept, alive - over)
                constant += fixed * (alive - over)
        return terms, constant

    def _point(
        self, moment: tuple[int, ...], number: int, layer: int | None, phase: int, rebuilt: list[Term]
    ) -> None:
        """Bytes alive at one point of the turn of chunk ``number``: before the backward, or in a phase of
        the backward of ``layer``."""
        terms, constant = self._kept(moment, number, layer)
        extra = 0
        terms += rebuilt
        if layer is not None:
            kept, fixed = self.blocks[layer].kept(phase)
            terms += kept
            constant += fixed
            extra = self.problem.workspace(phase)
        self.memory.row(terms, constant, extra)

    def follow(self, demands: Counts) -> None:
        """Rebuild each region on demand in just so many layers of each chunk. Then every solution costs
        the same, and the first one that is found will do."""
        for (chunk, name), count in demands.items():
            blocks = [self.blocks[layer] for layer in self.problem.chunks[chunk]]
            terms = [term for block in blocks for term in block.on_demand(name)]
            self.model.row(terms, at_least=count, at_most=count)

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
