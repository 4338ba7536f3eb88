"""A lower bound on ``opt`` that usually closes the gap: the same program with its windows pooled.

All forward windows are one pool, and so are all backward windows that come before a layer's own
backward; what is rebuilt in those is counted only from the backward just before. Every plan is a
solution of this program at the same cost, so its optimum is a bound; it is small, since a layer sees
five slots and not dozens.

A pool alone would let a region be split over two windows. Where few regions fit into one window,
``patterns`` says how windows can be filled, and the number of windows filled each way is a variable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lynx.plan import Window
from megatron_lynx.planner.block import Block, Scale, Slot, Term, minus
from megatron_lynx.planner.milp import HALF_NS_IN_US
from megatron_lynx.planner.price import candidates
from megatron_lynx.planner.stage_model import StageModel

MOST_PATTERNS = 400


@dataclass(frozen=True, slots=True)
class Pool:
    """The key of a pooled slot of a chunk: ``forward``, ``stall``, ``head``, ``backward`` before a layer, or
    a layer's ``own`` windows."""

    kind: str
    chunk: int


class PooledModel(StageModel):
    """StageModel with pooled windows; only its bound is of use."""

    def _scale(self) -> Scale:
        return Scale.of(self.problem, down=True)

    def _block(self, layer: int) -> Block:
        number = self.problem.chunk_of(layer)
        chunk, before = self.problem.chunks[number], self.before[number]
        slots: list[Slot] = []
        forwards = [self.problem.capacity_ns(w) for w in self.forwards[number]]
        start = before - len(self.idle[number])
        if forwards:
            # One slot at the first forward level: rebuilt early or late, alive at the end of it.
            slots.append(Slot(Pool("forward", number), start - 1, max(forwards)))
        for i, window in enumerate(self.idle[number]):
            room, idle = self.problem.capacity_ns(window), window.kind == "stall"
            slots.append(Slot(Pool(window.kind, number), start + i, room, idle=idle))
        behind = chunk[-1] - layer
        widest = max(self._backward_caps(), default=0)
        own_level = before + behind * self.problem.phases
        if behind:
            slots.append(Slot(Pool("backward", number), own_level - 1, widest))
        own = self.problem.backward_slots[0].partition(".")[0] if self.problem.backward_slots else ""
        if own:
            last = max(self.problem.phase_of(Window("bwd", 0, s)) for s in self.problem.backward_slots)
            slots.append(Slot(Pool("own", number), own_level + last, widest, own=own))
        levels = own_level + self.problem.phases
        return Block(self.model, self.problem, slots, levels, soft=self.options.soft, loose=True)

    def _alive(self, layer: int, level: int) -> list[Term]:
        """In a pool, what passes through may come and go before others come: count what stays."""
        block, number = self.blocks[layer], self.problem.chunk_of(layer)
        if level >= block.own:
            return block.alive(level, self.scale, done=block.levels)
        before = self.before[number]
        pooled = level >= before or level == before - len(self.idle[number]) - 1
        return block.alive(level, self.scale, done=level + pooled)

    def _backward_caps(self) -> list[int]:
        window_ns = self.problem.costs.window_ns
        return [window_ns(Window("bwd", 0, slot)) for slot in self.problem.backward_slots]

    def _capacities(self, budget: bool) -> None:
        """Forward pools, stall, head; backward windows summed up from the first backward on."""
        soft, each = self.options.soft, sum(self._backward_caps())
        loads: dict[Pool, list[Term]] = {}
        for layer in self.problem.backward_order:
            block = self.blocks[layer]
            for j, slot in enumerate(block.slots):
                assert isinstance(slot.key, Pool)
                loads.setdefault(slot.key, []).extend(block.load_us(j))
                if slot.key.kind == "own":
                    self._backward_row(layer, loads, each, budget)
        for pool, terms in loads.items():
            if pool.kind in ("own", "backward") or not terms:
                continue
            self._fill(terms, self._pool_ns(pool), budget)
            if pool.kind == "forward" and not soft:
                self._patterns(pool)

    def _backward_row(self, layer: int, loads: dict[Pool, list[Term]], each: int, budget: bool) -> None:
        """What backward windows do for layers down to this one fits into those down to it."""
        number = self.problem.chunk_of(layer)
        done = self.problem.chunks[number][-1] - layer + 1
        terms = [*loads.get(Pool("own", number), []), *loads.get(Pool("backward", number), [])]
        if terms:
            self._fill(terms, done * each, budget)

    def _fill(self, terms: list[Term], capacity_ns: int, budget: bool) -> None:
        if self.options.soft:
            terms = [*terms, (self.excess(budget), -1.0)]
        self.model.row(terms, at_most=capacity_ns / 1000 + HALF_NS_IN_US)

    def excess(self, budget: bool) -> int:
        """A variable for work beyond a window, in microseconds."""
        return self.model.variable(budget / self.problem.costs.contention, upper=math.inf, integer=False)

    def _pool_ns(self, pool: Pool) -> int:
        if pool.kind == "forward":
            return sum(self.problem.capacity_ns(w) for w in self.forwards[pool.chunk])
        return self.problem.stall_ns if pool.kind == "stall" else self.problem.head_ns

    def _patterns(self, pool: Pool) -> None:
        """sum over layers of (r in the pool) <= sum over patterns of count(r) * windows filled so."""
        chunk = self.problem.chunks[pool.chunk]
        rooms: dict[int, int] = {}
        for window in self.forwards[pool.chunk]:
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
            found = _maximal([times[n] for n in names], room, len(chunk), MOST_PATTERNS)
            if found is None:
                return
            filled = [self.model.variable(upper=count) for _ in found]
            self.model.row([(y, 1.0) for y in filled], at_most=count)
            for y, pattern in zip(filled, found, strict=True):
                for name, number in zip(names, pattern, strict=True):
                    if number:
                        supply[name].append((y, float(number)))
        for name in names:
            demand = [t for layer in chunk for t in self.blocks[layer].in_slot(name, 0)]
            if demand:
                self.model.row([*demand, *minus(supply[name])], at_most=0.0)


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
