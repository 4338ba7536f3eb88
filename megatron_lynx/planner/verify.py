"""An independent referee: it walks a stage's windows and backward passes with a plan in hand.

It keeps a ledger of every block of memory by name, opens the windows in order, rebuilds what is due,
then goes through each layer's backward region by region and rebuilds on demand what is missing. It
shares no code with the solvers or their pricing. What it finds wrong is data (``Violation``), and
``timeline`` draws the walk with a mark at each fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_lynx.graph import INPUT, LayerGraph, Storage
from megatron_lynx.plan import DEMAND, KEEP, LayerPlan, StagePlan, Window
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.units import format_bytes, format_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule.

    ``kind``: ``layers`` (not this stage's layers), ``unknown`` (a region or window that does not
    exist), ``order`` (choices out of forward order, twice, or an explicit keep), ``communicates`` (a
    collective inside a window), ``late`` (the window comes after the need), ``not-ready`` (what the
    region reads is not at hand), ``overfull`` (``over`` ns beyond the window), ``input`` (the
    layer's input cannot be rebuilt), ``memory`` (``over`` bytes beyond the budget). ``point`` is
    the window or ``backward LAYER`` (with the region that begins the phase, after the first one)
    where it happens, or ``forward`` (its end), ``embedding``, ``step``.
    """

    kind: str
    point: str
    layer: int = -1
    region: str = ""
    over: int = 0

    def __str__(self) -> str:
        where = f" layer {self.layer}" * (self.layer >= 0) + f" {self.region}" * bool(self.region)
        unit = format_ns if self.kind == "overfull" else format_bytes
        return f"{self.kind} at {self.point}:{where}" + (f" {unit(self.over)} over" if self.over else "")


@dataclass(slots=True)
class Step:
    """One point of the walk: bytes alive, and work done in it."""

    point: str
    alive_bytes: int
    work_ns: int = 0
    capacity_ns: int | None = None


@dataclass(slots=True)
class Walk:
    """The referee's notes: steps in order, violations, and time on the critical path."""

    steps: list[Step] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    exposed_ns: int = 0


def verify(
    problem: StageProblem, plan: StagePlan, *, graph: LayerGraph | None = None, soft: bool = False
) -> tuple[Violation, ...]:
    """Everything that is wrong with ``plan``; empty if it is sound.

    ``graph`` replaces the problem's where a baseline is counted by another one. ``soft`` allows
    windows to be overrun.
    """
    return tuple(walk(problem, plan, graph=graph, soft=soft).violations)


def walk(
    problem: StageProblem, plan: StagePlan, *, graph: LayerGraph | None = None, soft: bool = False
) -> Walk:
    """Go through the stage with ``plan`` and note what happens: the backward of each chunk in turn, at
    the moment when most memory is held. Moments differ in nothing else."""
    notes = Walk(violations=_malformed(problem, plan))
    if notes.violations:
        return notes
    for chunk in reversed(range(len(problem.chunks))):
        moments = [
            _Referee(problem, plan, graph or problem.graph, soft, chunk, alive).run()
            for alive in problem.turns[chunk].moments
        ]
        worst = max(moments, key=lambda one: max(step.alive_bytes for step in one.steps))
        notes.steps += worst.steps
        notes.violations += worst.violations
        notes.exposed_ns += worst.exposed_ns
    if problem.step_bytes:
        notes.steps.append(Step("step", problem.step_bytes))
        if problem.step_bytes > problem.budget_bytes:
            over = problem.step_bytes - problem.budget_bytes
            notes.violations.append(Violation(kind="memory", point="step", over=over))
    return notes


def timeline(problem: StageProblem, plan: StagePlan, result: Walk) -> str:
    """The walk as text, one line a point, with ``<-- kind`` where a rule is broken."""
    lines = [f"stage {plan.stage}, budget {format_bytes(problem.budget_bytes)}"]
    marks: dict[str, list[str]] = {}
    for violation in result.violations:
        marks.setdefault(violation.point, []).append(str(violation))
    for step in result.steps:
        cap = "" if step.capacity_ns is None else f" of {format_ns(step.capacity_ns)}"
        work = f"{format_ns(step.work_ns)}{cap}"
        mark = "  <-- " + "; ".join(marks.pop(step.point)) if step.point in marks else ""
        lines.append(f"  {step.point:<28} {format_bytes(step.alive_bytes):>12}  {work}{mark}")
    lines += [f"  {point}  <-- {'; '.join(texts)}" for point, texts in marks.items()]
    return "\n".join(lines)


def _malformed(problem: StageProblem, plan: StagePlan) -> list[Violation]:
    """Faults that make a walk meaningless."""
    if plan.chunks != problem.chunks or plan.stage != problem.stage:
        return [Violation(kind="layers", point="plan")]
    windows = {window for chunk in range(len(problem.chunks)) for window in problem.windows(chunk)}
    place = {name: i for i, name in enumerate(problem.graph.names)}
    found = []
    for layer in plan.layers:
        places = []
        for region, choice in layer.choices:
            if region in place and (not isinstance(choice, Window) or choice in windows):
                places.append(place[region])
            else:
                fault = Violation(kind="unknown", point=str(choice), layer=layer.layer, region=region)
                found.append(fault)
            if choice == KEEP:
                found.append(Violation(kind="order", point="plan", layer=layer.layer, region=region))
        if any(a >= b for a, b in pairwise(places)):
            found.append(Violation(kind="order", point="plan", layer=layer.layer))
    return found


class _Referee:
    """One walk through the turn of ``chunk`` with ``alive`` microbatches of each chunk. ``held`` maps
    (layer, storage) to bytes that count once per microbatch, ``again`` those that were rebuilt, with what
    still has to read them."""

    def __init__(
        self,
        problem: StageProblem,
        plan: StagePlan,
        graph: LayerGraph,
        soft: bool,
        chunk: int,
        alive: tuple[int, ...],
    ) -> None:
        self.problem, self.plan, self.graph, self.soft = problem, plan, graph, soft
        self.notes = Walk()
        self.extra = 0
        """What a moment outside of the layers takes."""
        self.windows = problem.windows(chunk)
        self.own = problem.chunks[chunk]
        self.first, self.last = chunk == 0, chunk == len(problem.chunks) - 1
        self.plans = {p.layer: p for p in plan.layers}
        self.dropped = {p.layer: p.dropped for p in plan.layers}
        self.regions = {region.name: region for region in self.graph.regions}
        self.readers = {s.name: self.graph.readers(s.name) for s in self.graph.storages}
        self.made = {name: self.graph.produced_by(name) for name in self.regions}
        self.sizes = {s.name: s.size_bytes for s in self.graph.storages}
        self.saved = {n: [s.producer for s in self.graph.storages if n in s.saved_by] for n in self.regions}
        self.held = {p.layer: self._kept(p) for p in plan.layers}
        self.whole = {layer: sum(blocks.values()) for layer, blocks in self.held.items()}
        self.kept = sum(
            count * self.whole[layer]
            for layers, count in zip(problem.chunks, alive, strict=True)
            for layer in layers
        )
        self.slots: dict[str, list[str]] = {}
        for slot in problem.backward_slots:
            self.slots.setdefault(slot.partition(".")[0], []).append(slot)
        self.again: dict[tuple[int, str], set[str]] = {}
        self.expected: set[tuple[int, str]] = set()
        self.leaving: list[tuple[int, str]] = []
        self.gone: set[tuple[int, str]] = set()
        """What the layer in its backward has released of what its own microbatch kept."""
        self.releases = {s.name: self.graph.release_phase(s.name) for s in self.graph.storages}

    def _kept(self, plan: LayerPlan) -> dict[str, int]:
        gone = plan.dropped
        return {s.name: s.size_bytes for s in self.graph.storages if self.graph.is_kept(s, gone)}

    def _fault(self, kind: str, point: str, layer: int = -1, region: str = "", over: int = 0) -> None:
        self.notes.violations.append(Violation(kind=kind, point=point, layer=layer, region=region, over=over))

    def run(self) -> Walk:
        due = {
            window: tuple(pair for pair in pairs if pair[0] in self.own)
            for window, pairs in self.plan.windows().items()
        }
        for window in self.windows:
            if window.kind == "fwd":
                self._open(window, due.get(window, ()))
                self._close(str(window))
        self.extra = self.problem.head_bytes if self.last else 0
        self._close("forward")
        for window in self.windows:
            if window.kind in ("stall", "head"):
                self._open(window, due.get(window, ()))
                self._close(str(window))
        self.extra = 0
        for layer in reversed(self.own):
            self._backward(layer, due)
        if self.first and self.problem.embedding_bytes:
            self.extra = self.problem.embedding_bytes
            self._close("embedding")
        return self.notes

    # Rebuilding ---------------------------------------------------------------------------------

    def _users(self, layer: int, storage: Storage) -> set[str]:
        """Who will read a rebuilt storage: ``bwd`` and the dropped regions that are yet to run."""
        users = {r for r in self.readers[storage.name] if r in self.dropped[layer]}
        return users | ({"bwd"} if storage.saved_by else set())

    def _at_hand(self, layer: int, name: str) -> bool:
        return (name in self.held[layer] and (layer, name) not in self.gone) or (layer, name) in self.again

    def _run_again(self, layer: int, region: str, point: str) -> None:
        """Note what ``region`` reads and makes."""
        for read in self.regions[region].reads:
            if not self._at_hand(layer, read):
                self._fault("not-ready", point, layer, region)
            elif (layer, read) in self.again:
                self.again[layer, read].discard(region)
                self._release(layer, read)
        self.expected.add((layer, region))
        for storage in self.made[region]:
            users = self._users(layer, storage)
            users = {u for u in users if u == "bwd" or (layer, u) not in self.expected}
            if self._users(layer, storage):
                self.again[layer, storage.name] = users
                self._release(layer, storage.name)

    def _release(self, layer: int, name: str) -> None:
        """A block that nobody will read goes at the end of the point."""
        if not self.again[layer, name]:
            self.leaving.append((layer, name))

    def _open(self, window: Window, pairs: Iterable[tuple[int, str]]) -> None:
        """Rebuild what is due in ``window``."""
        work, capacity, point = 0, self.problem.capacity_ns(window), str(window)
        for layer, region in pairs:
            if (layer, region) in self.expected:
                continue
            if self.regions[region].communicates or region == INPUT:
                self._fault("communicates", point, layer, region)
            if not self.problem.serves(window, layer, region):
                self._fault("late", point, layer, region)
            work += self.problem.work_ns(region, window)
            self._run_again(layer, region, point)
        if work > capacity:
            self.notes.exposed_ns += self.problem.excess_ns(window, work)
            if not self.soft:
                self._fault("overfull", point, over=work - capacity)
        self.notes.steps.append(Step(point, 0, work, capacity))

    # A layer's backward -------------------------------------------------------------------------

    def _backward(self, layer: int, due: dict[Window, tuple[tuple[int, str], ...]]) -> None:
        """Windows and on-demand rebuilding of one layer, from its last region to its first."""
        point, before = f"backward {layer}", self.notes.exposed_ns
        if INPUT in self.dropped[layer]:
            self._restore_input(layer, point)
        for name in self.dropped[layer]:
            aimless = not any(self._users(layer, storage) for storage in self.made[name])
            if aimless and self.plans[layer].choice(name) == DEMAND:
                self._need(layer, name, point)
        phase = 0
        for place in range(len(self.graph.regions) - 1, -1, -1):
            region = self.graph.regions[place].name
            if region in self.graph.cuts:
                self._end_phase(layer, phase, point, before)
                point, before, phase = f"backward {layer} {region}", self.notes.exposed_ns, phase + 1
            for producer in self.saved[region]:
                self._need(layer, producer, point)
            for slot in self.slots.get(region, ()):
                window = Window("bwd", layer, slot)
                self._open(window, due.get(window, ()))
        for name in self.dropped[layer]:
            self._need(layer, name, point)
        self._end_phase(layer, phase, point, before)
        self.kept -= self.whole[layer]
        self.gone.clear()
        for key in [k for k in self.again if k[0] == layer]:
            self._fault("not-ready", point, layer, key[1])
            del self.again[key]

    def _end_phase(self, layer: int, phase: int, point: str, exposed_before_ns: int) -> None:
        """Count what is alive, then release what no later phase needs."""
        self.notes.steps.append(Step(point, 0, self.notes.exposed_ns - exposed_before_ns))
        self._close(point, layer, phase)
        over = {name for name, release in self.releases.items() if release <= phase}
        self.gone = {(layer, name) for name in over & self.held[layer].keys()}
        for key in [k for k in self.again if k[0] == layer and k[1] in over]:
            if "bwd" in self.again[key]:
                del self.again[key]

    def _need(self, layer: int, region: str, point: str) -> None:
        """Rebuild ``region`` on demand if it was dropped and is not at hand, after what it reads."""
        if region not in self.dropped[layer] or (layer, region) in self.expected:
            return
        choice = self.plans[layer].choice(region)
        if isinstance(choice, Window):
            late = not self.problem.serves(choice, layer, region)
            self._fault("late" if late else "not-ready", str(choice) if late else point, layer, region)
            self.expected.add((layer, region))
            return
        for read in self.regions[region].reads:
            if not self._at_hand(layer, read):
                self._need(layer, self.graph.storage(read).producer, point)
        if region != INPUT:
            self.notes.exposed_ns += self.problem.demand_ns(region)
            self._run_again(layer, region, point)

    def _restore_input(self, layer: int, point: str) -> None:
        """Run the layer before again, to its end, for the sake of this one's input."""
        if (layer, INPUT) in self.expected:
            return
        before = self.plans.get(layer - 1)
        together = before is not None and self.problem.chunk_of(layer) == self.problem.chunk_of(layer - 1)
        if before is None or not together or self.graph.regions[-1].name not in before.dropped:
            self._fault("input", point, layer, INPUT)
        else:
            if INPUT in before.dropped:
                self._restore_input(layer - 1, point)
            for name in self.graph.names:
                if name != INPUT:
                    self._need(layer - 1, name, point)
        self._run_again(layer, INPUT, point)

    # Counting -----------------------------------------------------------------------------------

    def _close(self, point: str, layer: int | None = None, phase: int = 0) -> None:
        """Count what is alive, then let go what nobody will read."""
        if not self.notes.steps or self.notes.steps[-1].point != point:
            self.notes.steps.append(Step(point, 0))
        alive = self._alive(layer, phase)
        self.notes.steps[-1].alive_bytes = alive
        if alive > self.problem.budget_bytes:
            self._fault("memory", point, over=alive - self.problem.budget_bytes)
        for key in self.leaving:
            self.again.pop(key, None)
        self.leaving = []

    def _alive(self, layer: int | None, phase: int) -> int:
        """Bytes alive now: before the backward, or in a phase of the backward of ``layer``."""
        gone = sum(self.held[k][name] for k, name in self.gone)
        rebuilt = sum(self.sizes[name] for _, name in self.again)
        work = self.extra if layer is None else self.problem.workspace(phase)
        return self.kept - gone + rebuilt + work
