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


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """One layer's share: ``memory`` and ``rebuilt`` bytes at every point, ``kept`` bytes of one
    microbatch, ``exposed_ns`` on demand, and the work it puts into windows."""

    memory: Bytes
    rebuilt: Bytes
    kept: int
    exposed_ns: int
    loads: Mapping[Window, int]


@dataclass(frozen=True, slots=True)
class Price:
    """A stage's totals; ``points`` names the entries of ``memory``."""

    exposed_ns: int
    hidden_ns: int
    kept_bytes: int
    rebuilt_bytes: int
    peak_bytes: int
    peak_point: str


class Pricer:
    """Prices plans of one problem, by its graph or another one (``selective``)."""

    def __init__(self, problem: StageProblem, graph: LayerGraph | None = None) -> None:
        self.problem = problem
        self.graph = graph or problem.graph
        self.layers = problem.layers
        windows, order = problem.windows(), problem.backward_order
        early, phases = [w for w in windows if w.kind != "bwd"], problem.phases
        forwards = sum(w.kind == "fwd" for w in early)
        self.points = [*map(str, early), *(point_of(problem, k, p) for k in order for p in range(phases))]
        self.points.insert(forwards, "forward")
        self.before = len(early) + 1
        """Points up to here come before any backward."""
        self.backward = {layer: self.before + i * phases for i, layer in enumerate(order)}
        """The point of the first phase of each layer's backward."""
        self.phases = phases
        self.at = {w: self.backward[w.layer] + problem.phase_of(w) for w in windows if w.kind == "bwd"}
        self.at.update({w: i + (i >= forwards) for i, w in enumerate(early)})
        self.capacity = {w: problem.capacity_ns(w) for w in windows}
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
        self.workspaces = np.zeros(len(self.points), dtype=np.int64)
        for phase in range(phases):
            self.workspaces[self.before + phase :: phases] = problem.workspace(phase)
        self.flights: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        """The point after a layer's last chunk-mate's backward."""
        for chunk, count in zip(problem.chunks, problem.in_flight, strict=True):
            for layer in chunk:
                self.flights[layer], self.ends[layer] = count, self.backward[chunk[0]] + phases

    def layer(self, index: int, choices: Choices, demand_at: int | None = None) -> LayerPrice:
        """Price one layer; ``demand_at`` is the point of its on-demand work if another layer's backward
        asks for it."""
        own, phases = self.backward[index], self.phases
        when = {n: self.at[c] for n, c in choices.items() if isinstance(c, Window)}
        if demand_at is None:
            when |= {n: own + phase for n, phase in self._demand_phases(choices).items()}
        else:
            when |= {n: demand_at for n, c in choices.items() if not isinstance(c, Window)}
        rebuilt = np.zeros(len(self.points), dtype=np.int64)
        kept = carried = 0
        released = [0] * phases
        for producer, size, saved, reading, release in self.storages:
            first = when.get(producer)
            if first is None:
                if saved or any(r in when for r in reading):
                    kept += size
                    released[release] += size
                continue
            last = own + release if saved else max((when[r] for r in reading if r in when), default=-1)
            if last >= 0:
                rebuilt[first : last + 1] += size
                carried += size if first < self.before <= last else 0
        exposed, loads = 0, dict[Window, int]()
        for name, choice in choices.items():
            if isinstance(choice, Window):
                work = self.idle_work if choice.kind == "stall" else self.work
                loads[choice] = loads.get(choice, 0) + work[name]
            else:
                exposed += self.demand[name]
        memory = np.full(len(self.points), kept * self.flights[index], dtype=np.int64)
        for phase in range(phases):
            memory[own + phase + 1 : self.ends[index]] -= released[phase]
        if len(self.problem.chunks) > 1:
            rebuilt[self.ends[index] :] = carried
            rebuilt[self.before : self.backward[self._mates(index)[-1]]] = carried
        return LayerPrice(memory + rebuilt, rebuilt, kept, exposed, loads)

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

    def _mates(self, index: int) -> tuple[int, ...]:
        return self.problem.chunks[self.problem.chunk_of(index)]

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
                found[layer] = self.backward[layer + 1] if earlier is None else earlier
        return found

    def memory(self, prices: Sequence[LayerPrice]) -> Bytes:
        """Bytes at every point."""
        total = np.zeros(len(self.points), dtype=np.int64)
        for price in prices:
            total += price.memory
        return total + self.workspaces

    def total(self, prices: Sequence[LayerPrice]) -> Price:
        """Add layers up (in the order of ``layers``)."""
        memory = self.memory(prices)
        rebuilt = sum((p.rebuilt for p in prices), np.zeros(len(self.points), dtype=np.int64))
        loads: dict[Window, int] = {}
        for price in prices:
            for window, load in price.loads.items():
                loads[window] = loads.get(window, 0) + load
        excess = sum(self.problem.excess_ns(w, load) for w, load in loads.items())
        kept = sum(p.kept * self.flights[layer] for p, layer in zip(prices, self.layers, strict=True))
        peak = int(memory.argmax())
        return Price(
            exposed_ns=sum(p.exposed_ns for p in prices) + excess,
            hidden_ns=sum(min(load, self.capacity[w]) for w, load in loads.items()),
            kept_bytes=kept,
            rebuilt_bytes=int(rebuilt.max()),
            peak_bytes=int(memory[peak]),
            peak_point=self.points[peak],
        )


def point_of(problem: StageProblem, layer: int, phase: int) -> str:
    """The name of a point in a layer's backward."""
    return f"backward {layer}" + (f" {problem.graph.cuts[phase - 1]}" if phase else "")


def fits_whole(problem: StageProblem) -> bool:
    """Whether everything can be kept."""
    flights = sum(n * len(chunk) for n, chunk in zip(problem.in_flight, problem.chunks, strict=True))
    graph, extra = problem.graph, 0
    for phase in range(problem.phases) if problem.layers else ():
        gone = sum(s.size_bytes for s in graph.storages if s.saved_by and graph.release_phase(s.name) < phase)
        extra = max(extra, problem.workspace(phase) - gone)
    return graph.kept_bytes() * flights + extra <= problem.budget_bytes


def candidates(graph: LayerGraph) -> tuple[str, ...]:
    """Regions that a planner chooses for: those with a storage that some backward reads, and
    those without that lead to one (a droppable region reads what they produce)."""
    wanted = set(graph.droppable())
    for region in reversed(graph.regions):
        if region.name == INPUT or region.name in wanted:
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
