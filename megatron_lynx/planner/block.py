"""One layer's decisions as integer variables, shared by ``heu`` (one for all layers) and ``opt``.

Glossary (r a region, j a slot, that is a window in its place in the order):
  drop[r]    1 if r is not kept
  by[r][j]   1 if r is dropped and rebuilt in slot j or before; absent where r may not go into j
  early[r,j] 1 if r is run again on demand before the layer's own slot j opens
  asked[r,p] 1 if r is run again on demand in phase p of the layer's own backward or before
With ``count`` a block stands for so many layers, and its variables for sums over them.
A slot belongs to a level, a point at which memory is counted; the last levels are the phases of the
layer's own backward. Sizes are in a unit that ``Scale`` chooses, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from megatron_lynx.graph import Storage
from megatron_lynx.plan import DEMAND, Choice
from megatron_lynx.planner.milp import Model
from megatron_lynx.planner.price import candidates
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.scale import Scale, Term

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Slot:
    """A window as a layer sees it. ``own`` is the region at which it opens, if it belongs to the
    layer's own backward."""

    key: Hashable
    level: int
    capacity_ns: int
    idle: bool = False
    own: str = ""


class Block:
    """The variables and rows of one layer, of a policy for several, or (``count``) of several layers
    summed up, which is a relaxation: fit for a bound, and then ``loose`` leaves rows out that cost
    much and say little."""

    def __init__(
        self,
        model: Model,
        problem: StageProblem,
        slots: Sequence[Slot],
        levels: int,
        scale: Scale,
        *,
        soft: bool,
        loose: bool = False,
        count: int = 1,
    ) -> None:
        self.model, self.problem, self.slots, self.levels = model, problem, tuple(slots), levels
        self.count, self.scale = count, scale
        self.names = candidates(problem.graph)
        self.order = {name: i for i, name in enumerate(problem.graph.names)}
        self.drop = {name: self._variable() for name in self.names}
        self.work = {name: [self._work(name, slot) for slot in self.slots] for name in self.names}
        self.by: dict[str, list[int | None]] = {}
        for name in self.names:
            self.by[name] = [
                self._variable() if self._may(name, j, soft) else None for j in range(len(self.slots))
            ]
        self.edges = [
            (source, name)
            for name in self.names
            for source in problem.graph.inputs_of(name)
            if source in self.drop
        ]
        self.starts = [sum(s.level < level for s in self.slots) for level in range(levels + 1)]
        self.own = levels - problem.phases
        """The level of the first phase of the layer's own backward."""
        graph = problem.graph
        self.latest = {name: graph.latest_phase(name) for name in self.names}
        self.release = {s.name: graph.release_phase(s.name) for s in graph.storages}
        self.asked: dict[tuple[str, int], int] = {}
        self.passed: dict[str, int] = {}
        self._kept: dict[int, tuple[list[Term], float]] = {}
        self._alive: dict[tuple[int, int], list[Term]] = {}
        self._chains()
        self._purpose()
        self._precedence()
        self._demands()
        if not loose:
            self._early()

    def _variable(self, *, integer: bool = True) -> int:
        return self.model.variable(upper=self.count, integer=integer)

    def _work(self, name: str, slot: Slot) -> int:
        return self.problem.costs.rebuild_ns(name, hidden=not slot.idle)

    def _may(self, name: str, j: int, soft: bool) -> bool:
        """Whether ``name`` can be rebuilt in slot ``j`` at all."""
        slot = self.slots[j]
        if self.problem.graph.region(name).communicates or slot.capacity_ns <= 0:
            return False
        if slot.own and self.problem.last_reader(name) >= self.order[slot.own]:
            return False
        return soft or self.work[name][j] <= slot.capacity_ns

    def before(self, name: str, j: int) -> list[Term]:
        """1 if ``name`` is rebuilt in a slot before ``j``."""
        made = [v for v in self.by[name][:j] if v is not None]
        return [(made[-1], 1.0)] if made else []

    def on_demand(self, name: str) -> list[Term]:
        """1 if ``name`` is rebuilt on demand."""
        return [(self.drop[name], 1.0), *minus(self.before(name, len(self.slots)))]

    def pay_demand(self) -> None:
        """Charge the model for what is rebuilt on demand, in microseconds."""
        for name in self.names:
            for variable, factor in self.on_demand(name):
                self.model.costs[variable] += factor * self.problem.demand_ns(name) / 1000

    def in_slot(self, name: str, j: int) -> list[Term]:
        """1 if ``name`` is rebuilt in slot ``j``."""
        variable = self.by[name][j]
        return [] if variable is None else [(variable, 1.0), *minus(self.before(name, j))]

    def load_us(self, j: int) -> list[Term]:
        """Microseconds of work in slot ``j``."""
        return [(v, f * self.work[name][j] / 1000) for name in self.names for v, f in self.in_slot(name, j)]

    def _chains(self) -> None:
        """by[r][j] <= by[r][j+1] <= drop[r]."""
        for name in self.names:
            chain = [v for v in self.by[name] if v is not None] + [self.drop[name]]
            for a, b in pairwise(chain):
                self.model.row([(a, 1.0), (b, -1.0)], at_most=0.0)

    def _purpose(self) -> None:
        """Nothing is dropped for nobody: what no backward reads, only if a reader of it is dropped."""
        for name in self.names:
            if self.problem.last_reader(name) < 0:
                readers = [(self.drop[r], -1.0) for source, r in self.edges if source == name]
                self.model.row([(self.drop[name], 1.0), *readers], at_most=0.0)

    def _precedence(self) -> None:
        """A region in a window reads what is kept or was rebuilt no later:
        by[r][j] <= 1 - drop[q] + by[q][j] for every q that r reads."""
        for source, name in self.edges:
            for j, variable in enumerate(self.by[name]):
                if variable is not None:
                    self.model.row(
                        [(variable, 1.0), (self.drop[source], 1.0), *minus(self.before(source, j + 1))],
                        at_most=self.count,
                    )

    def _early(self) -> None:
        """What runs again on demand before an own slot opens cannot read what is rebuilt in it."""
        for j, slot in enumerate(self.slots):
            first = slot.own and (j == 0 or self.slots[j - 1].own != slot.own)
            if not first or not any(v is not None for n in self.names for v in self.by[n][j:]):
                continue
            early: dict[str, int] = {}
            for name in reversed(self.names):
                needed = self.problem.last_reader(name) >= self.order[slot.own]
                readers = [early[r] for source, r in self.edges if source == name and r in early]
                if not needed and not readers:
                    continue
                early[name] = self._variable(integer=False)
                here = [(early[name], -1.0), *self.on_demand(name)]
                if needed:
                    self.model.row(here, at_most=0.0)
                for reader in readers:
                    self.model.row([*here, (reader, 1.0)], at_most=self.count)
                    late = [*self.before(name, len(self.slots)), *minus(self.before(name, j))]
                    self.model.row([*late, (reader, 1.0)], at_most=self.count)

    def _demands(self) -> None:
        """asked[r,p], where that is not settled by the phase alone: 1 exactly if r is dropped and in no
        window, and some reader of it is asked for by then."""
        for phase in range(self.problem.phases - 1):
            for name in reversed(self.names):
                readers = [r for source, r in self.edges if source == name and self._asked(r, phase)]
                if phase >= self.latest[name] or not readers:
                    continue
                asked = self.asked[name, phase] = self._variable(integer=False)
                self.model.row([(asked, 1.0), *minus(self.on_demand(name))], at_most=0.0)
                some: list[Term] = [(asked, 1.0)]
                for reader in readers:
                    terms = self._asked(reader, phase)
                    self.model.row([*self.on_demand(name), *terms, (asked, -1.0)], at_most=self.count)
                    some += minus(terms)
                self.model.row(some, at_most=0.0)

    def _asked(self, name: str, phase: int) -> list[Term]:
        """1 if ``name`` is run again on demand in ``phase`` or before."""
        if phase >= self.latest[name]:
            return self.on_demand(name)
        variable = self.asked.get((name, phase))
        return [] if variable is None else [(variable, 1.0)]

    # Memory -------------------------------------------------------------------------------------

    def kept(self, phase: int = 0) -> tuple[list[Term], float]:
        """Kept units of one microbatch that are there in ``phase`` of the layer's own backward, or
        before it: terms and a constant."""
        if phase not in self._kept:
            self._kept[phase] = self._kept_in(phase)
        return self._kept[phase]

    def _kept_in(self, phase: int) -> tuple[list[Term], float]:
        terms: list[Term] = []
        constant = 0.0
        for storage in self.problem.graph.storages:
            if self.release[storage.name] < phase:
                continue
            size, producer = self.scale.size(storage.size_bytes), storage.producer
            if storage.saved_by:
                constant += size * self.count
                terms += [(self.drop[producer], -size)] if producer in self.drop else []
                continue
            readers = [r for r in self.problem.graph.readers(storage.name) if r in self.drop]
            if readers:
                terms.append((self._held(storage, readers), size))
        return terms, constant

    def _held(self, storage: Storage, readers: list[str]) -> int:
        """1 if a storage that no backward reads is kept for a dropped region."""
        if storage.name not in self.passed:
            held = self.passed[storage.name] = self._variable(integer=False)
            gone = [(self.drop[storage.producer], -1.0)] if storage.producer in self.drop else []
            windows, producer = len(self.slots), storage.producer
            made = self.before(producer, windows) if producer in self.drop else []
            for reader in readers:
                self.model.row([(self.drop[reader], 1.0), *gone, (held, -1.0)], at_most=0.0)
                # A window that runs the reader finds it rebuilt or kept: true anyhow, but not of sums.
                again = self.before(reader, windows)
                if again:
                    self.model.row([*again, *minus(made), (held, -1.0)], at_most=0.0)
        return self.passed[storage.name]

    def alive(self, level: int, *, done: int | None = None) -> list[Term]:
        """Units rebuilt and alive at ``level``.

        What only passes on is alive as long as some reader is not rebuilt in a window below level
        ``done`` (``level`` unless told).
        """
        done = level if done is None else done
        if (level, done) in self._alive:
            return self._alive[level, done]
        phase, below = level - self.own, self.starts[done]

        def over(reader: str) -> list[Term]:
            return [*self.before(reader, below), *(self._asked(reader, phase - 1) if phase > 0 else [])]

        found = self._alive[level, done] = self.rebuilt(phase, lambda name: self._made(name, level), over)
        return found

    def rebuilt(
        self,
        phase: int,
        made: Callable[[str], list[Term]],
        over: Callable[[str], list[Term]],
    ) -> list[Term]:
        """Units rebuilt and alive in ``phase`` of the own backward (below 0: before it), where
        ``made(r)`` is 1 if r has run again by then, and ``over(r)`` if it did so before."""
        terms: list[Term] = []
        for storage in self.problem.graph.storages:
            if storage.producer not in self.drop:
                continue
            size, here = self.scale.size(storage.size_bytes), made(storage.producer)
            if not here:
                continue
            if not storage.saved_by:
                terms += self._passing(storage, here, phase, over, size)
            elif phase <= self.release[storage.name]:
                terms += [(v, f * size) for v, f in here]
        return terms

    def _made(self, name: str, level: int) -> list[Term]:
        """1 if ``name`` is run again at ``level`` or before."""
        phase = level - self.own
        if phase >= self.latest[name]:
            return [(self.drop[name], 1.0)]
        here = self.before(name, self.starts[level + 1])
        return here if phase < 0 else [*here, *self._asked(name, phase)]

    def _passing(
        self,
        storage: Storage,
        here: list[Term],
        phase: int,
        over: Callable[[str], list[Term]],
        size: float,
    ) -> list[Term]:
        """A storage that no backward reads: alive until its dropped readers have run, at the latest in
        the phase by which each must have."""
        readers = [r for r in self.problem.graph.readers(storage.name) if r in self.drop]
        readers = [r for r in readers if phase <= self.latest[r]]
        if not readers:
            return []
        held = self._variable(integer=False)
        for reader in readers:
            terms = [*here, (self.drop[reader], 1.0), *minus(over(reader)), (held, -1.0)]
            self.model.row(terms, at_most=self.count)
        return [(held, size)]

    # Reading and writing ------------------------------------------------------------------------

    def choices(self, values: Sequence[float]) -> dict[str, Hashable]:
        """What a solution says for each dropped region: a slot's key or ``demand``."""
        made: dict[str, Hashable] = {}
        for name in self.names:
            if values[self.drop[name]] < 0.5:
                continue
            chosen: Hashable = DEMAND
            for slot, variable in zip(self.slots, self.by[name], strict=True):
                if variable is not None and values[variable] > 0.5:
                    chosen = slot.key
                    break
            made[name] = chosen
        return made

    def hint(self, choices: Mapping[str, Choice]) -> dict[int, float]:
        """The integer variables of given choices (keys must be slots' keys)."""
        place = {slot.key: j for j, slot in enumerate(self.slots)}
        found: dict[int, float] = {}
        for name in self.names:
            choice = choices.get(name, "keep")
            found[self.drop[name]] = float(choice != "keep")
            at = place.get(choice, len(self.slots))
            for j, variable in enumerate(self.by[name]):
                if variable is not None:
                    found[variable] = float(j >= at)
        return found


def passes_early(problem: StageProblem, *, soft: bool) -> bool:
    """Whether memory must be counted before any backward too: only if a storage that no backward
    reads can be rebuilt there, and let go of before the first backward (where else is more)."""
    graph, names = problem.graph, candidates(problem.graph)
    windows = [w for chunk in range(len(problem.chunks)) for w in problem.windows(chunk)]
    longest = max((problem.capacity_ns(w) for w in windows if w.kind != "bwd"), default=0)
    return any(
        not storage.saved_by
        and storage.producer in names
        and set(graph.readers(storage.name)) & set(names)
        and not graph.region(storage.producer).communicates
        and (soft or problem.costs.rebuild_ns(storage.producer, hidden=False) <= longest)
        for storage in graph.storages
    )


def minus(terms: Sequence[Term]) -> list[Term]:
    """The terms with their signs turned."""
    return [(v, -f) for v, f in terms]


def tidy(problem: StageProblem, choices: Mapping[str, T]) -> dict[str, T]:
    """Keep what was dropped for nothing: regions without a saved storage that nobody reads."""
    made = dict(choices)
    for name in reversed(problem.graph.names):
        made_here = problem.graph.produced_by(name)
        if name in made and not any(s.saved_by for s in made_here):
            readers = {r for s in made_here for r in problem.graph.readers(s.name)}
            if not readers & made.keys():
                del made[name]
    return made
