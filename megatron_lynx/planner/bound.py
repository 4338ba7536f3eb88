"""A lower bound on ``opt`` that usually closes the gap: the same program with its layers summed up.

The layers of a stage are alike, so plans that only swap layers cost the same, and a program with a
variable for each layer spends its time on telling them apart. Here each chunk has two blocks: its last
layer, whose backward comes first, and all others as one, with counts for variables. All forward windows
are one pool, and so are the backward windows; memory is counted in the first backward of each chunk,
where it peaks. Every plan is a solution of this program at the same cost, so its optimum is a bound.

A pool alone would let a region be split over two windows. Where few regions fit into one window,
``patterns`` says how windows can be filled, and the number of windows filled each way is a variable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_lynx.plan import Window
from megatron_lynx.planner.block import Block, Scale, Slot, Term, minus
from megatron_lynx.planner.milp import HALF_NS_IN_US, Model, Solution
from megatron_lynx.planner.price import candidates
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import SolveOptions
from megatron_lynx.planner.stage_model import ONE_NS, ONE_UNIT, scaled

MOST_PATTERNS = 400


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The blocks of one chunk: its last layer, and the others (None if there are none)."""

    first: Block
    rest: Block | None

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.first,) if self.rest is None else (self.first, self.rest)


class BoundModel:
    """The program of a stage with its layers summed up. With ``budget`` it bounds the time, without it
    the peak, in units of ``scale``."""

    def __init__(self, problem: StageProblem, options: SolveOptions, *, budget: bool) -> None:
        self.problem, self.options = problem, options
        self.model, self.scale = Model(), Scale.of(problem, down=True)
        self.step = ONE_NS if budget else ONE_UNIT
        slots = problem.backward_slots
        self.caps = [problem.capacity_ns(Window("bwd", 0, slot)) for slot in slots]
        self.chunks = {number: self._chunk(number) for number, layers in enumerate(problem.chunks) if layers}
        self.peak = None if budget else self.model.variable(1.0, upper=math.inf, integer=False)
        for chunk in self.chunks.values() if budget else ():
            for block in chunk.blocks:
                for name in block.names:
                    for variable, factor in block.on_demand(name):
                        self.model.costs[variable] += factor * problem.demand_ns(name) / 1000
        for number in self.chunks:
            self._capacities(number, budget)
        for number in range(len(problem.chunks)):
            self._memory(number)

    def _chunk(self, number: int) -> _Chunk:
        count = len(self.problem.chunks[number]) - 1
        return _Chunk(self._block(number, 0), self._block(number, count) if count else None)

    def _block(self, number: int, others: int) -> Block:
        """The last layer's block, or that of ``others``; its slots are pools."""
        problem, slots = self.problem, list[Slot]()
        windows = problem.windows(number)
        rooms = {kind: [problem.capacity_ns(w) for w in windows if w.kind == kind] for kind in ("fwd", "bwd")}
        if rooms["fwd"]:
            slots.append(Slot("fwd", 0, max(rooms["fwd"])))
        level = 1
        for window in windows:
            if window.kind in ("stall", "head"):
                idle = window.kind == "stall"
                slots.append(Slot(window.kind, level, problem.capacity_ns(window), idle=idle))
                level += 1
        if any(self.caps):
            if others:
                slots.append(Slot("bwd", level, max(self.caps)))
            at = [Window("bwd", 0, slot) for slot in problem.backward_slots]
            own = level + (others > 0) + max(map(problem.phase_of, at))
            slots.append(Slot("own", own, max(self.caps), own=at[0].slot.partition(".")[0]))
        levels = level + (others > 0) + problem.phases
        soft = self.options.soft
        return Block(self.model, problem, slots, levels, soft=soft, loose=True, count=max(1, others))

    def _capacities(self, number: int, budget: bool) -> None:
        """Forward pool, stall, head, and the backward windows: those of the last layer, and all."""
        chunk, each = self.chunks[number], sum(self.caps)
        loads: dict[str, list[Term]] = {}
        for block in chunk.blocks:
            for j, slot in enumerate(block.slots):
                kind = "bwd" if slot.key == "own" else str(slot.key)
                loads.setdefault(kind, []).extend(block.load_us(j))
            if block is chunk.first and "bwd" in loads and not self.options.soft:
                self.model.row(loads["bwd"], at_most=each / 1000 + HALF_NS_IN_US)
        for kind, terms in loads.items():
            windows = [w for w in self.problem.windows(number) if w.kind == kind]
            room = sum(map(self.problem.capacity_ns, windows))
            if self.options.soft:
                price = budget / self.problem.slowdown(kind)
                terms = [*terms, (self.model.variable(price, upper=math.inf, integer=False), -1.0)]
            self.model.row(terms, at_most=room / 1000 + HALF_NS_IN_US)
        if "fwd" in loads and not self.options.soft:
            self._patterns(number)

    def _patterns(self, number: int) -> None:
        """sum over layers of (r in the pool) <= sum over patterns of count(r) * windows filled so."""
        rooms: dict[int, int] = {}
        for window in self.problem.windows(number):
            if window.kind == "fwd":
                room = self.problem.capacity_ns(window)
                rooms[room] = rooms.get(room, 0) + 1
        graph, costs = self.problem.graph, self.problem.costs
        times = {
            name: costs.rebuild_ns(name, hidden=True)
            for name in candidates(graph)
            if not graph.region(name).communicates
        }
        names = sorted(times, key=lambda n: -times[n])
        supply: dict[str, list[Term]] = {name: [] for name in names}
        for room, count in rooms.items():
            most = len(self.problem.chunks[number])
            found = _maximal([times[n] for n in names], room, most, MOST_PATTERNS)
            if found is None:
                return
            filled = [self.model.variable(upper=count) for _ in found]
            self.model.row([(y, 1.0) for y in filled], at_most=count)
            for y, pattern in zip(filled, found, strict=True):
                for name, times_in in zip(names, pattern, strict=True):
                    if times_in:
                        supply[name].append((y, float(times_in)))
        for name in names:
            demand = [term for block in self.chunks[number].blocks for term in block.in_slot(name, 0)]
            if demand:
                self.model.row([*demand, *minus(supply[name])], at_most=0.0)

    def _memory(self, number: int) -> None:
        """Bytes alive in the first backward of a chunk, at each moment of its turn."""
        problem, scale, own = self.problem, self.scale, self.chunks.get(number)
        for moment in problem.turns[number].moments:
            for phase in range(problem.phases if own else 1):
                terms, constant = self._kept(dict(enumerate(moment)), number)
                if own:
                    here, fixed = own.first.kept(scale, phase)
                    terms += here
                    constant += fixed
                    terms += self._rebuilt(own, phase)
                self._row(terms, constant, problem.workspace(phase) if own else 0)

    def _kept(self, moment: Mapping[int, int], number: int) -> tuple[list[Term], float]:
        """Kept units, once less of the last layer of chunk ``number``."""
        terms, constant = list[Term](), 0.0
        for other, chunk in self.chunks.items():
            for block in chunk.blocks:
                times = moment[other] - (other == number and block is chunk.first)
                kept, fixed = block.kept(self.scale)
                terms += scaled(kept, times)
                constant += fixed * times
        return terms, constant

    def _rebuilt(self, chunk: _Chunk, phase: int) -> list[Term]:
        """Rebuilt units in a phase of the first backward. What passes through a pool may come and go
        before others come: of that only what stays is counted."""
        first, rest = chunk.first, chunk.rest
        terms = first.alive(first.own + phase, self.scale, done=first.levels)
        if rest is not None:
            before = rest.own - 1
            terms += rest.alive(before - 1, self.scale, done=before)
        return terms

    def _row(self, terms: list[Term], constant: float, extra_bytes: int) -> None:
        if self.peak is not None:
            constant += extra_bytes / self.scale.unit
            self.model.row([*terms, (self.peak, -1.0)], at_most=-constant)
        else:
            room = self.scale.room(self.problem.budget_bytes - extra_bytes)
            self.model.row(terms, at_most=room - constant)

    def solve(self, deadline: float) -> Solution:
        """Minimise until ``deadline`` (``time.monotonic``); only the bound is of use."""
        return self.model.solve(self.options, deadline=deadline, absolute_gap=self.step)


def _maximal(times: list[int], room: int, most: int, limit: int) -> list[tuple[int, ...]] | None:
    """Every way to fill ``room`` with up to ``most`` of each so that nothing more fits; None if
    there are more than ``limit``. ``times`` are in descending order."""
    found: list[tuple[int, ...]] = []
    for pattern in _fillings(times, room, most):
        found.append(pattern)
        if len(found) > limit:
            return None
    return found


def _fillings(times: list[int], room: int, most: int) -> Iterator[tuple[int, ...]]:
    """Fillings that are maximal in the last kind of region, given the others."""
    if not times:
        yield ()
        return
    fit = most if times[0] == 0 else min(most, room // times[0])
    lowest = fit if len(times) == 1 else 0
    for number in range(fit, lowest - 1, -1):
        for rest in _fillings(times[1:], room - number * times[0], most):
            yield (number, *rest)
