"""A lower bound on ``opt`` that usually closes the gap: the same program with its layers summed up.

The layers of a stage are alike, so plans that only swap layers cost the same, and a program with a
variable for each layer spends its time on telling them apart. Here the layers of a chunk whose backward
comes first have a block each, and all others one together, with counts for variables. All forward
windows are one pool, and so are the backward windows; memory is counted in those first backwards, where
it peaks. Every plan is a solution of this program at the same cost, so its optimum is a bound; and how
often it rebuilds each region on demand leads to a plan that meets it (``StageModel.follow``).

A pool alone would let a region be split over two windows, and work overrun one window into another.
Where few regions fit into one window, the ways to fill it (``Filling``) are listed, and the number of
windows filled each way is a variable.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from megatron_lynx.plan import Window
from megatron_lynx.planner.block import Block, Slot, minus
from megatron_lynx.planner.milp import HALF_NS_IN_US, Model, Solution
from megatron_lynx.planner.price import candidates
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import SolveOptions
from megatron_lynx.planner.scale import ONE_NS, ONE_UNIT, Memory, Scale, Term, scaled
from megatron_lynx.planner.stage_model import Counts

MOST_FILLINGS = 400
APART = 2
"""Layers with a block of their own."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The blocks of one chunk: its last layers, in the order of their backward, and the others (None if
    there are none). ``before`` levels come before any backward."""

    apart: tuple[Block, ...]
    rest: Block | None
    before: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.apart if self.rest is None else (*self.apart, self.rest)


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
        self.memory = Memory(self.model, problem, self.scale, budget=budget)
        for chunk in self.chunks.values() if budget else ():
            for block in chunk.blocks:
                block.pay_demand()
        for number in self.chunks:
            self._capacities(number, budget)
        for number in range(len(problem.chunks)):
            self._memory(number)

    def _chunk(self, number: int) -> _Chunk:
        """The blocks' slots are pools: forward, backward before its own, and its own."""
        layers = len(self.problem.chunks[number])
        apart, windows = min(APART, layers), self.problem.windows(number)
        early, forward = list[Slot](), [self.problem.capacity_ns(w) for w in windows if w.kind == "fwd"]
        if forward:
            early.append(Slot("fwd", 0, max(forward)))
        before = 1
        for window in windows:
            if window.kind in ("stall", "head"):
                room, idle = self.problem.capacity_ns(window), window.kind == "stall"
                early.append(Slot(window.kind, before, room, idle=idle))
                before += 1
        blocks = [self._block(early, before + i * self.problem.phases, i > 0) for i in range(apart)]
        others = layers - apart
        own = before + apart * self.problem.phases
        return _Chunk(tuple(blocks), self._block(early, own, True, others) if others else None, before)

    def _block(self, early: list[Slot], own: int, later: bool, count: int = 1) -> Block:
        """One layer's block, or that of ``count`` layers. The phases of its own backward begin at level
        ``own``; ``later`` says that the backward of other layers comes before."""
        problem, slots = self.problem, list(early)
        if any(self.caps):
            windows = [Window("bwd", 0, slot) for slot in problem.backward_slots]
            if later:
                slots.append(Slot("bwd", own - 1, max(self.caps)))
            at = own + max(map(problem.phase_of, windows))
            slots.append(Slot("own", at, max(self.caps), own=windows[0].slot.partition(".")[0]))
        levels = own + problem.phases
        return Block(
            self.model, problem, slots, levels, self.scale, soft=self.options.soft, loose=True, count=count
        )

    def _capacities(self, number: int, budget: bool) -> None:
        """Forward pool, stall, head, and the backward windows down to each layer apart, and all."""
        chunk, each = self.chunks[number], sum(self.caps)
        loads: dict[str, list[Term]] = {}
        for i, block in enumerate(chunk.blocks):
            for j, slot in enumerate(block.slots):
                kind = "bwd" if slot.key == "own" else str(slot.key)
                loads.setdefault(kind, []).extend(block.load_us(j))
            if i < len(chunk.apart) and "bwd" in loads and not self.options.soft:
                self.model.row(loads["bwd"], at_most=(i + 1) * each / 1000 + HALF_NS_IN_US)
        for kind, terms in loads.items():
            listed = kind in ("fwd", "bwd") and self._fillings(number, kind, budget)
            if listed and self.options.soft:
                continue  # the excess is paid there
            windows = [w for w in self.problem.windows(number) if w.kind == kind]
            room = sum(map(self.problem.capacity_ns, windows))
            if self.options.soft:
                price = budget / self.problem.slowdown(kind)
                terms = [*terms, (self.model.variable(price, upper=math.inf, integer=False), -1.0)]
            self.model.row(terms, at_most=room / 1000 + HALF_NS_IN_US)

    def _fillings(self, number: int, kind: str, budget: bool) -> bool:
        """sum over layers of (regions in the pool) <= sum over fillings of their number * windows filled so,
        for regions of each length.

        Where windows may be overrun, a filling overruns by one region at most, and pays for that; any
        more of a region is extra and pays for all of its time. Returns False, and does nothing, if there
        are too many fillings to list.
        """
        problem, costs, soft = self.problem, self.problem.costs, self.options.soft
        rooms = Counter(
            room for w in problem.windows(number) if w.kind == kind and (room := problem.capacity_ns(w))
        )
        names = [n for n in candidates(problem.graph) if not problem.graph.region(n).communicates]
        lengths = sorted({costs.rebuild_ns(n, hidden=True) for n in names} - {0}, reverse=True)
        most = len(problem.chunks[number]) * len(names)
        listed = {
            room: list(islice(fillings(lengths, room, most, soft), MOST_FILLINGS + 1)) for room in rooms
        }
        if any(len(found) > MOST_FILLINGS for found in listed.values()):
            return False
        price = budget / problem.slowdown(kind) / 1000
        supply: dict[int, list[Term]] = {length: [] for length in lengths}
        for room, found in listed.items():
            ways = [self.model.variable(price * over, upper=rooms[room]) for _, over in found]
            self.model.row([(way, 1.0) for way in ways], at_most=rooms[room])
            for way, (filling, _) in zip(ways, found, strict=True):
                for length, count in zip(lengths, filling, strict=True):
                    supply[length] += [(way, float(count))] if count else []
        for length, terms in supply.items():
            if soft:
                terms.append((self.model.variable(price * length, upper=most, integer=False), 1.0))
            demand = [
                term
                for block in self.chunks[number].blocks
                for j, slot in enumerate(block.slots)
                if slot.key == kind or (kind, slot.key) == ("bwd", "own")
                for name in block.names
                if block.work[name][j] == length
                for term in block.in_slot(name, j)
            ]
            self.model.row([*demand, *minus(terms)], at_most=0.0)
        return True

    def _memory(self, number: int) -> None:
        """Bytes alive in the backwards of a chunk, at each moment of its turn."""
        problem, chunk = self.problem, self.chunks.get(number)
        ending, beginning = problem.ending(number), problem.beginning(number)
        for moment in problem.turns[number].moments:
            if beginning:
                done = len(chunk.blocks) if chunk else 0
                self.memory.row(*self._kept(moment, number, done), beginning)
            if chunk is None:
                self.memory.row(*self._kept(moment), ending)
                continue
            if ending:
                terms, constant = self._kept(moment)
                for block in chunk.blocks:
                    terms += block.alive(chunk.before - 1, done=chunk.before)
                self.memory.row(terms, constant, ending)
            for phase in range(problem.phases):
                for i in range(len(chunk.apart)):
                    self._first(moment, number, i, phase)

    def _kept(self, moment: tuple[int, ...], number: int = -1, done: int = 0) -> tuple[list[Term], float]:
        """Kept units: once less of the first ``done`` blocks of chunk ``number``."""
        terms, constant = list[Term](), 0.0
        for other, chunk in self.chunks.items():
            for i, block in enumerate(chunk.blocks):
                times = moment[other] - (other == number and i < done)
                kept, fixed = block.kept()
                terms += scaled(kept, times)
                constant += fixed * times
        return terms, constant

    def _first(self, moment: tuple[int, ...], number: int, i: int, phase: int) -> None:
        """A phase of the backward of layer ``i`` of those apart. What passes through a pool may come and
        go before others come: of that only what stays is counted."""
        chunk = self.chunks[number]
        block, level = chunk.apart[i], chunk.apart[i].own + phase
        terms, constant = self._kept(moment, number, i + 1)
        here, fixed = block.kept(phase)
        terms += [*here, *block.alive(level, done=block.levels)]
        for later in chunk.apart[i + 1 :]:
            terms += later.alive(level, done=level + 1)
        if chunk.rest is not None:
            terms += chunk.rest.alive(chunk.before - 1, done=chunk.before)
        self.memory.row(terms, constant + fixed, self.problem.workspace(phase))

    def solve(self, deadline: float) -> Solution:
        """Minimise until ``deadline`` (``time.monotonic``)."""
        return self.model.solve(self.options, deadline=deadline, absolute_gap=self.step)

    def demands(self, solution: Solution) -> Counts:
        """In how many layers of each chunk a solution rebuilds each region on demand."""
        found: Counts = {}
        for number, chunk in self.chunks.items():
            for name in chunk.apart[0].names:
                terms = [term for block in chunk.blocks for term in block.on_demand(name)]
                found[number, name] = round(sum(f * solution.values[v] for v, f in terms))
        return found


Filling = tuple[int, ...]
"""How often each of several regions is in one window."""


def fillings(times: Sequence[int], room: int, most: int, soft: bool) -> Iterator[tuple[Filling, int]]:
    """The ways to fill a window of ``room`` with up to ``most`` of each region, and by how much each
    overruns it: those into which nothing more fits; where ``soft``, also all that overrun it by their
    last region. ``times`` are above 0."""
    for filling in _fitting(times, room, most):
        left = room - sum(n * t for n, t in zip(filling, times, strict=True))
        more = [i for i, n in enumerate(filling) if n < most]
        if all(times[i] > left for i in more):
            yield filling, 0
        for i in more if soft and left else ():
            if times[i] > left:
                yield (*filling[:i], filling[i] + 1, *filling[i + 1 :]), times[i] - left


def _fitting(times: Sequence[int], room: int, most: int) -> Iterator[Filling]:
    """All ways to put regions into ``room``."""
    if not times:
        yield ()
        return
    for number in range(min(most, room // times[0]), -1, -1):
        for rest in _fitting(times[1:], room - number * times[0], most):
            yield (number, *rest)
