"""The best plan of a small stage by looking at all of them: an oracle for ``opt``.

Every assignment of every layer is a row of codes (-1 keep, a window's number, or the number of windows
for on demand). Rows that break a rule go; the rest become vectors (exposed time, load of each window,
bytes at each point), of which only those that no other one beats are combined with the next layer's.
It is written from the rules in ``planner/problem.py`` and shares nothing with solvers or verifier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.plan import Window
from megatron_lynx.planner.problem import StageProblem

Array = NDArray[np.int64]
KEEP = -1


@dataclass(frozen=True, slots=True)
class Best:
    """The least exposed time (None if nothing fits) and the lowest peak of any plan."""

    exposed_ns: int | None
    lowest_bytes: int


def droppable(graph: LayerGraph) -> list[str]:
    """Regions that produce anything; to drop another one costs time for nothing."""
    return [n for n in graph.names if n != INPUT and graph.produced_by(n)]


def chunk_of(problem: StageProblem, layer: int) -> int:
    """The number of the chunk that holds a layer."""
    return next(i for i, chunk in enumerate(problem.chunks) if layer in chunk)


def options(problem: StageProblem, layer: int, region: str, soft: bool = False) -> list[int]:
    """The codes that a region may have on its own, in the order of its chunk's windows; ``soft`` lets it
    overrun a window."""
    windows = problem.windows(chunk_of(problem, layer))
    codes = [KEEP, len(windows)]
    if problem.graph.region(region).communicates:
        return codes
    for i, window in enumerate(windows):
        capacity = problem.capacity_ns(window)
        fits = (soft and capacity > 0) or problem.work_ns(region, window) <= capacity
        if fits and _in_time(problem, window, layer, region):
            codes.append(i)
    return codes


def _in_time(problem: StageProblem, window: Window, layer: int, region: str) -> bool:
    if window.kind != "bwd" or window.layer > layer:
        return True
    names = problem.graph.names
    saved = [names.index(r) for s in problem.graph.produced_by(region) for r in s.saved_by]
    return window.layer == layer and max(saved, default=-1) < names.index(window.slot.split(".")[0])


def count(problem: StageProblem, soft: bool = False) -> int:
    """How many assignments the layer with most of them has."""
    numbers = [
        int(np.prod([len(options(problem, layer, r, soft)) for r in droppable(problem.graph)], dtype=object))
        for layer in problem.layers
    ]
    return max(numbers, default=1)


def best(problem: StageProblem, soft: bool = False) -> Best:
    """Look at every plan of the stage."""
    layers = [_vectors(problem, layer, soft) for layer in problem.layers]
    numbers = range(len(problem.chunks))
    windows = [window for chunk in numbers for window in problem.windows(chunk)]
    capacities = np.array([problem.capacity_ns(w) for w in windows], dtype=np.int64)
    width = len(capacities)
    extra = np.concatenate([np.zeros(1 + width, dtype=np.int64), *(_workspace(problem, c) for c in numbers)])
    total = extra[None, :]
    for vectors in layers:
        total = (total[:, None, :] + vectors[None, :, :]).reshape(-1, len(extra))
        within = (total[:, 1 : 1 + width] <= capacities).all(axis=1)
        total = _unbeaten(total if soft else total[within])
    for i, window in enumerate(windows):
        over = np.maximum(total[:, 1 + i] - capacities[i], 0)
        slowed = 1.0 if window.kind == "stall" else problem.costs.contention
        total[:, 0] += np.ceil(over / slowed).astype(np.int64)
    peaks = np.maximum(total[:, 1 + width :].max(axis=1), problem.step_bytes)
    fitting = total[peaks <= problem.budget_bytes]
    return Best(int(fitting[:, 0].min()) if len(fitting) else None, int(peaks.min()))


def _before(problem: StageProblem, chunk: int) -> int:
    """Points before any backward of a chunk: forward windows, the end of the forward, stall, head."""
    return 1 + sum(w.kind != "bwd" for w in problem.windows(chunk))


def _after(problem: StageProblem, chunk: int) -> int:
    """Points after the last backward of a chunk: that of the embedding, where there is one."""
    return int(chunk == 0 and problem.embedding_bytes > 0)


def _workspace(problem: StageProblem, chunk: int) -> Array:
    """Workspace at the points of a chunk's turn, moment by moment."""
    phases = [problem.workspace(phase) for phase in range(problem.phases)]
    forwards = sum(w.kind == "fwd" for w in problem.windows(chunk))
    head = problem.head_bytes if chunk == len(problem.chunks) - 1 else 0
    points = [0] * forwards + [head] * (_before(problem, chunk) - forwards)
    points += phases * len(problem.chunks[chunk]) + [problem.embedding_bytes] * _after(problem, chunk)
    return np.array(points * len(problem.turns[chunk].moments), dtype=np.int64)


def _vectors(problem: StageProblem, layer: int, soft: bool) -> Array:
    """One layer's rows that break no rule, as (exposed, loads, bytes at points)."""
    own = chunk_of(problem, layer)
    graph, windows = problem.graph, problem.windows(own)
    names = droppable(graph)
    grid = np.meshgrid(*[options(problem, layer, r, soft) for r in names], indexing="ij")
    code = {n: g.reshape(-1).astype(np.int64) for n, g in zip(names, grid, strict=True)}
    if not names:
        code = {}
    rows = len(next(iter(code.values()))) if code else 1
    good = _sound(problem, layer, code, rows)
    code = {n: c[good] for n, c in code.items()}
    rows = int(good.sum())
    exposed = np.zeros(rows, dtype=np.int64)
    loads = np.zeros((rows, len(windows)), dtype=np.int64)
    for name, codes in code.items():
        exposed += np.where(codes == len(windows), problem.demand_ns(name), 0)
        for i, window in enumerate(windows):
            loads[:, i] += np.where(codes == i, problem.work_ns(name, window), 0)
    every = [np.zeros((rows, len(problem.windows(c))), dtype=np.int64) for c in range(len(problem.chunks))]
    every[own] = loads
    memory = _memory(problem, layer, code, rows)
    return _unbeaten(np.concatenate([exposed[:, None], *every, memory], axis=1))


def _sound(problem: StageProblem, layer: int, code: dict[str, Array], rows: int) -> NDArray[np.bool_]:
    """Rows in which everything is at hand when it is read, and nothing is dropped for nobody."""
    graph, windows = problem.graph, problem.windows(chunk_of(problem, layer))
    demand, place = len(windows), {n: i for i, n in enumerate(graph.names)}
    good = np.ones(rows, dtype=bool)
    for name, codes in code.items():
        made = graph.produced_by(name)
        if not any(s.saved_by for s in made):  # nothing is dropped for nobody
            readers = {r for s in made for r in graph.readers(s.name) if r in code}
            wanted = np.zeros(rows, dtype=bool)
            for reader in readers:
                wanted |= code[reader] != KEEP
            good &= (codes == KEEP) | wanted
        for source in graph.inputs_of(name):
            if source in code:
                in_window = (codes != KEEP) & (codes != demand)
                good &= ~(in_window & (code[source] > codes))
    need: dict[str, Array] = {}
    for name in reversed(list(code)):
        made = graph.produced_by(name)
        need[name] = np.full(rows, max((place[r] for s in made for r in s.saved_by), default=-1))
        for storage in made:
            for reader in graph.readers(storage.name):
                if reader in code:
                    on_demand = code[reader] == demand
                    need[name] = np.where(on_demand, np.maximum(need[name], need[reader]), need[name])
        for i, window in enumerate(windows):
            if window.kind == "bwd" and window.layer == layer:
                late = need[name] >= place[window.slot.split(".")[0]]
                good &= ~((code[name] == i) & late)
    return good


def _memory(problem: StageProblem, layer: int, code: dict[str, Array], rows: int) -> Array:
    """Bytes of one layer at every point of every turn."""
    chunk = chunk_of(problem, layer)
    graph, windows = problem.graph, problem.windows(chunk)
    before, phases = _before(problem, chunk), problem.phases
    order = problem.chunks[chunk][::-1]
    own = before + order.index(layer) * phases
    places, forwards = [], sum(w.kind == "fwd" for w in windows)
    for i, window in enumerate(windows):
        if window.kind == "bwd":
            part = graph.phase_of(window.slot.partition(".")[0])
            places.append(before + order.index(window.layer) * phases + part)
        else:
            places.append(i if i < forwards else i + 1)
    made = _made_at(problem, code, rows, np.array([*places, 0, 0], dtype=np.int64), own)
    kept = np.zeros(rows, dtype=np.int64)
    over = np.zeros((rows, phases), dtype=np.int64)
    points = before + len(order) * phases + _after(problem, chunk)
    rebuilt = np.zeros((rows, points), dtype=np.int64)
    for storage in graph.storages:
        end = own + graph.release_phase(storage.name)
        dropped = code[storage.producer] != KEEP if storage.producer in code else np.zeros(rows, dtype=bool)
        readers = [r for r in graph.readers(storage.name) if r in code]
        wanted = np.full(rows, bool(storage.saved_by))
        last = np.full(rows, end if storage.saved_by else -1)
        for reader in readers:
            wanted |= code[reader] != KEEP
            if not storage.saved_by:
                last = np.where(code[reader] != KEEP, np.maximum(last, made[reader]), last)
        kept += np.where(~dropped & wanted, storage.size_bytes, 0)
        for phase in range(end - own + 1, phases):
            over[:, phase] += np.where(~dropped & wanted, storage.size_bytes, 0)
        if storage.producer in code:
            first = made[storage.producer]
            held = dropped & wanted
            for point in range(points):
                alive = held & (first <= point) & (point <= last)
                rebuilt[:, point] += np.where(alive, storage.size_bytes, 0)
    gone = np.zeros((rows, points), dtype=np.int64)
    gone[:, own + phases :] = kept[:, None]
    gone[:, own : own + phases] = over
    found = []
    for number, turn in enumerate(problem.turns):
        size = _before(problem, number) + len(problem.chunks[number]) * phases + _after(problem, number)
        for moment in turn.moments:
            whole = np.repeat(moment[chunk] * kept[:, None], size, axis=1)
            found.append(whole + rebuilt - gone if number == chunk else whole)
    return np.concatenate(found, axis=1)


def _made_at(
    problem: StageProblem, code: dict[str, Array], rows: int, table: Array, own: int
) -> dict[str, Array]:
    """The point at which each dropped region runs again; ``table`` has those of windows, then two that
    stand for on demand and kept."""
    graph, demand, found = problem.graph, len(table) - 2, dict[str, Array]()
    never = own + problem.phases
    for name in reversed(list(code)):
        saved = [r for s in graph.produced_by(name) for r in s.saved_by]
        first = np.full(rows, own + min((graph.phase_of(r) for r in saved), default=problem.phases))
        for storage in graph.produced_by(name):
            for reader in graph.readers(storage.name):
                if reader in code:
                    asks = np.where(code[reader] == demand, found[reader], never)
                    first = np.minimum(first, asks)
        first = np.where(first == never, own, first)
        found[name] = np.where(code[name] == demand, first, table[code[name]])
    return found


def _unbeaten(vectors: Array) -> Array:
    """Rows that no other row beats or equals in every column."""
    vectors = np.unique(vectors, axis=0)
    vectors = vectors[np.argsort(vectors.sum(axis=1), kind="stable")]
    alive = np.ones(len(vectors), dtype=bool)
    for i in range(len(vectors)):
        if alive[i]:
            beaten = (vectors[i + 1 :] >= vectors[i]).all(axis=1)
            alive[i + 1 :] &= ~beaten
    return vectors[alive]
