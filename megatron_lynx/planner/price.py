"""Pricing a plan in integer nanoseconds and bytes: the solvers' own account.

``Pricer`` follows the rules in ``problem`` layer by layer, so that a search can change one layer
and add the rest up again. ``verify`` counts the same things in another way and shares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.plan import Choice, LayerPlan, StagePlan, Window
from megatron_lynx.planner.problem import StageProblem

Bytes = NDArray[np.int64]
Choices = Mapping[str, Choice]


Load = tuple[int, Window]
"""A window of one chunk: a stall before each chunk's backward is another one."""


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """One layer's share: ``memory`` and ``rebuilt`` bytes at every point, ``kept`` bytes of one
    microbatch, ``exposed_ns`` on demand, and the work it puts into windows."""

    memory: Bytes
    rebuilt: Bytes
    kept: int
    exposed_ns: int
    loads: Mapping[Load, int]


@dataclass(frozen=True, slots=True)
class Price:
    """A stage's totals; ``points`` names the entries of ``memory``."""

    exposed_ns: int
    hidden_ns: int
    kept_bytes: int
    rebuilt_bytes: int
    peak_bytes: int
    peak_point: str


class _Points:
    """The points of one chunk's turn, ``size`` for each of its moments, and where they stand in memory."""

    def __init__(self, problem: StageProblem, chunk: int, start: int) -> None:
        windows, phases = problem.windows(chunk), problem.phases
        layers, turn = problem.chunks[chunk][::-1], problem.turns[chunk]
        early = [w for w in windows if w.kind != "bwd"]
        forwards = sum(w.kind == "fwd" for w in early)
        self.before = len(early) + 1
        """Points before any backward."""
        self.backward = {layer: self.before + i * phases for i, layer in enumerate(layers)}
        """The point of the first phase of each layer's backward."""
        self.at = {w: self.backward[w.layer] + problem.phase_of(w) for w in windows if w.kind == "bwd"}
        self.at.update({w: i + (i >= forwards) for i, w in enumerate(early)})
        self.forward, self.after = forwards, self.before + len(layers) * phases
        """The point at the end of the forward pass, and that behind the last backward."""
        self.names = [*map(str, early), *(point_of(problem, k, p) for k in layers for p in range(phases))]
        self.names.insert(forwards, "forward")
        if problem.beginning(chunk):
            self.names.append("embedding")
        self.size, self.moments = len(self.names), turn.moments
        self.span = slice(start, start + self.size * len(turn.moments))

    def own(self, memory: Bytes) -> Bytes:
        """The part of ``memory`` that is this turn's, a row for each moment."""
        return memory[self.span].reshape(len(self.moments), self.size)


class Pricer:
    """Prices plans of one problem, by its graph or another one (``selective``)."""

    def __init__(self, problem: StageProblem, graph: LayerGraph | None = None) -> None:
        self.problem = problem
        self.graph = graph or problem.graph
        self.layers = problem.layers
        self.phases = problem.phases
        self.turns: list[_Points] = []
        for chunk in range(len(problem.chunks)):
            self.turns.append(_Points(problem, chunk, self.turns[-1].span.stop if self.turns else 0))
        self.size = self.turns[-1].span.stop if self.turns else 0
        self.chunk = {layer: chunk for chunk, layers in enumerate(problem.chunks) for layer in layers}
        self.demand = {n: problem.demand_ns(n) for n in problem.graph.names}
        self.work = {n: problem.costs.rebuild_ns(n, hidden=True) for n in problem.graph.names}
        self.idle_work = {n: problem.costs.rebuild_ns(n, hidden=False) for n in problem.graph.names}
        graph = self.graph
        self.storages = [
            (s.producer, s.size_bytes, bool(s.saved_by), graph.readers(s.name), graph.release_phase(s.name))
            for s in graph.storages
        ]
        self.needs = {n: graph.first_need(n) for n in graph.names}
        self.readers = {
            n: [r for s in graph.produced_by(n) for r in graph.readers(s.name)] for n in graph.names
        }
        self.workspaces = np.zeros(self.size, dtype=np.int64)
        self.alive = [np.zeros(self.size, dtype=np.int64) for _ in problem.chunks]
        """Microbatches of each chunk that are alive at every point."""
        for number, points in enumerate(self.turns):
            own = points.own(self.workspaces)
            for phase in range(self.phases):
                own[:, points.before + phase : points.after : self.phases] = problem.workspace(phase)
            own[:, points.forward : points.before] = problem.ending(number)
            own[:, points.after :] = problem.beginning(number)
            for chunk, alive in enumerate(self.alive):
                points.own(alive)[:] = [[moment[chunk]] for moment in points.moments]

    def layer(self, index: int, choices: Choices, demand_at: int | None = None) -> LayerPrice:
        """Price one layer; ``demand_at`` is the point of its on-demand work if another layer's backward
        asks for it."""
        chunk = self.chunk[index]
        points, phases = self.turns[chunk], self.phases
        own = points.backward[index]
        when = {n: points.at[c] for n, c in choices.items() if isinstance(c, Window)}
        if demand_at is None:
            when |= {n: own + phase for n, phase in self._demand_phases(choices).items()}
        else:
            when |= {n: demand_at for n, c in choices.items() if not isinstance(c, Window)}
        here = np.zeros(points.size, dtype=np.int64)
        kept, released = 0, [0] * phases
        for producer, size, saved, reading, release in self.storages:
            first = when.get(producer)
            if first is None:
                if saved or any(r in when for r in reading):
                    kept += size
                    released[release] += size
                continue
            last = own + release if saved else max((when[r] for r in reading if r in when), default=-1)
            here[first : last + 1] += size
        exposed, loads = 0, dict[Load, int]()
        for name, choice in choices.items():
            if isinstance(choice, Window):
                work = self.idle_work if choice.kind == "stall" else self.work
                loads[chunk, choice] = loads.get((chunk, choice), 0) + work[name]
            else:
                exposed += self.demand[name]
        rebuilt = np.zeros(self.size, dtype=np.int64)
        points.own(rebuilt)[:] = here
        memory = self.alive[chunk] * kept
        for phase in range(phases):
            here[own + phase + 1 :] -= released[phase]
        points.own(memory)[:] += here
        return LayerPrice(memory, rebuilt, kept, exposed, loads)

    def _demand_phases(self, choices: Choices) -> dict[str, int]:
        """The phase of its layer's backward in which each region on demand runs again."""
        found: dict[str, int] = {}
        for name in reversed(self.graph.names):
            choice = choices.get(name)
            if choice is None or isinstance(choice, Window):
                continue
            phases = [found[r] for r in self.readers[name] if r in found]
            need = self.needs[name]
            found[name] = 0 if name == INPUT else min(phases if need is None else [*phases, need], default=0)
        return found

    def price(self, plan: StagePlan) -> Price:
        """Price a whole plan."""
        demand_at = self._demand_points(plan)
        return self.total([self.layer(p.layer, dict(p.choices), demand_at[p.layer]) for p in plan.layers])

    def _demand_points(self, plan: StagePlan) -> dict[int, int | None]:
        """Where each layer's on-demand work is done: None for its own backward, or the backward of
        the layer after it, if that one's input has to be rebuilt from here."""
        found: dict[int, int | None] = {}
        dropped = {p.layer: INPUT in p.dropped for p in plan.layers}
        for layer in self.problem.backward_order:
            found[layer] = None
            if dropped.get(layer + 1, False):
                earlier = found[layer + 1]
                own = self.turns[self.chunk[layer + 1]].backward[layer + 1]
                found[layer] = own if earlier is None else earlier
        return found

    def memory(self, prices: Sequence[LayerPrice]) -> Bytes:
        """Bytes at every point."""
        total = np.zeros(self.size, dtype=np.int64)
        for price in prices:
            total += price.memory
        return total + self.workspaces

    def total(self, prices: Sequence[LayerPrice]) -> Price:
        """Add layers up (in the order of ``layers``)."""
        memory = self.memory(prices)
        rebuilt = sum((p.rebuilt for p in prices), np.zeros(self.size, dtype=np.int64))
        loads: dict[Load, int] = {}
        for price in prices:
            for window, load in price.loads.items():
                loads[window] = loads.get(window, 0) + load
        problem, pairs = self.problem, list(zip(prices, self.layers, strict=True))
        alive = sum((self.alive[self.chunk[k]] * p.kept for p, k in pairs), np.zeros_like(rebuilt))
        peak = int(memory.argmax()) if self.size else -1
        most = int(memory[peak]) if self.size else 0
        return Price(
            exposed_ns=sum(p.exposed_ns for p in prices)
            + sum(problem.excess_ns(w, load) for (_, w), load in loads.items()),
            hidden_ns=sum(min(load, problem.capacity_ns(w)) for (_, w), load in loads.items()),
            kept_bytes=int(alive.max()),
            rebuilt_bytes=int(rebuilt.max()),
            peak_bytes=max(most, problem.step_bytes),
            peak_point=self._name(peak) if most >= problem.step_bytes else "step",
        )

    def _name(self, point: int) -> str:
        points = next(points for points in self.turns if point < points.span.stop)
        return points.names[(point - points.span.start) % points.size]


def point_of(problem: StageProblem, layer: int, phase: int) -> str:
    """The name of a point in a layer's backward."""
    return f"backward {layer}" + (f" {problem.graph.cuts[phase - 1]}" if phase else "")


def fits_whole(problem: StageProblem) -> bool:
    """Whether everything can be kept."""
    graph, extra = problem.graph, 0
    if not _moments_fit(problem):
        return False
    for phase in range(problem.phases) if problem.layers else ():
        gone = sum(s.size_bytes for s in graph.storages if s.saved_by and graph.release_phase(s.name) < phase)
        extra = max(extra, problem.workspace(phase) - gone)
    return graph.kept_bytes() * problem.most_layers() + extra <= problem.budget_bytes


def _moments_fit(problem: StageProblem) -> bool:
    """Whether everything can be kept in the moments outside of the layers."""
    kept, last = problem.graph.kept_bytes(), len(problem.chunks) - 1
    head = kept * problem.most_layers(last) + problem.head_bytes
    others = problem.most_layers(0) - len(problem.chunks[0])
    embedding = kept * others + problem.embedding_bytes if problem.embedding_bytes else 0
    return max(head, embedding, problem.step_bytes) <= problem.budget_bytes


def candidates(graph: LayerGraph) -> tuple[str, ...]:
    """Regions that a planner chooses for: those with a storage that some backward reads, and
    those without that lead to one (a droppable region reads what they produce)."""
    wanted = set(graph.droppable())
    for region in reversed(graph.regions):
        if region.name in (INPUT, *graph.fixed) or region.name in wanted:
            continue
        readers = {r for s in graph.produced_by(region.name) for r in graph.readers(s.name)}
        if readers & wanted:
            wanted.add(region.name)
    return tuple(name for name in graph.names if name in wanted)


def stage_plan(problem: StageProblem, choices: Mapping[int, Choices]) -> StagePlan:
    """A StagePlan from each layer's choices (``keep`` may stand or be left out)."""
    names = problem.graph.names
    layers = []
    for layer in problem.layers:
        made = choices.get(layer, {})
        listed = tuple((n, made[n]) for n in names if made.get(n, "keep") != "keep")
        layers.append(LayerPlan(layer=layer, choices=listed))
    return StagePlan(stage=problem.stage, chunks=problem.chunks, layers=tuple(layers))
