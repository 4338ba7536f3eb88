"""``windows``: a plain greedy planner, and the sequence of plans it walks through.

Fill the windows with what fits, at no cost on the critical path, whether memory is short or not;
then, while it is over the budget, drop more on demand, the cheapest per byte first. The sequence does
not depend on the budget, so more memory never costs more, and the smallest budget is the lowest peak
in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.plan import Choice, Window
from megatron_lynx.planner.baselines import infeasible
from megatron_lynx.planner.price import Pricer, candidates, stage_plan
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import Answer, SolveOptions

Stage = dict[int, dict[str, Choice]]


def windows(problem: StageProblem, options: SolveOptions) -> Answer:
    """The first plan of the greedy sequence that fits."""
    pricer = Pricer(problem)
    prices = {layer: pricer.layer(layer, {}) for layer in problem.layers}
    lowest: int | None = None
    stage: Stage = {}
    for stage, changed in _sequence(problem):
        for layer in changed:
            prices[layer] = pricer.layer(layer, stage[layer])
        peak = int(pricer.memory(list(prices.values())).max())
        if peak <= problem.budget_bytes:
            return Answer(plan=stage_plan(problem, stage), status="heuristic")
        lowest = peak if lowest is None else min(lowest, peak)
    raise infeasible(problem, "windows", lowest or 0)


def _sequence(problem: StageProblem) -> Iterator[tuple[Stage, tuple[int, ...]]]:
    """Plans from filled windows to everything dropped, and the layers that changed since the last."""
    names = candidates(problem.graph)
    stage: Stage = {layer: {} for layer in problem.layers}
    _fill(problem, names, stage)
    yield stage, problem.layers
    by_price = sorted(names, key=lambda n: problem.demand_ns(n) / max(1, _bytes(problem, n)))
    for name in by_price:
        if not _bytes(problem, name):
            continue
        for layer in problem.backward_order[::-1]:
            if stage[layer].get(name) != "demand":
                _drop(problem, names, stage[layer], name, layer)
                yield stage, (layer,)
    everything: dict[str, Choice] = dict.fromkeys(names, "demand")
    yield dict.fromkeys(problem.layers, everything), problem.layers


def _bytes(problem: StageProblem, name: str) -> int:
    return sum(s.size_bytes for s in problem.graph.produced_by(name) if s.saved_by)


def _saves(problem: StageProblem, made: dict[str, Choice], name: str) -> bool:
    """Whether dropping ``name`` too frees memory: what it runs again from may have to stay instead."""
    return problem.graph.kept_bytes({*made, name}) < problem.graph.kept_bytes(made)


def _drop(
    problem: StageProblem, names: tuple[str, ...], made: dict[str, Choice], name: str, layer: int
) -> None:
    """Rebuild ``name`` of ``layer`` on demand, and with it what a window was to make from it, and what
    it reads that only a window of this layer's own backward was to make, which may open later. What it
    reads and no backward saves is dropped too, if that needs no collective."""
    made[name] = "demand"
    for storage in problem.graph.produced_by(name):
        for reader in problem.graph.readers(storage.name):
            if isinstance(made.get(reader), Window):
                _drop(problem, names, made, reader, layer)
    for source in problem.graph.inputs_of(name):
        choice = made.get(source)
        if isinstance(choice, Window):
            if choice.kind == "bwd" and choice.layer == layer:
                _drop(problem, names, made, source, layer)
            continue
        plain = source in names and not problem.graph.region(source).communicates
        if plain and choice is None and not _bytes(problem, source):
            _drop(problem, names, made, source, layer)


def _fill(problem: StageProblem, names: tuple[str, ...], stage: Stage) -> None:
    """Put regions into the latest window that has room, most bytes per nanosecond first."""
    windows = [problem.windows(chunk) for chunk in range(len(problem.chunks))]
    room = {(c, w): problem.capacity_ns(w) for c, ws in enumerate(windows) for w in ws}
    orders = [{w: i for i, w in enumerate(ws)} for ws in windows]
    single = [all(m[c] <= 1 for m in turn.moments) for c, turn in enumerate(problem.turns)]
    saving = [n for n in names if _bytes(problem, n) and not problem.graph.region(n).communicates]
    saving.sort(key=lambda n: problem.demand_ns(n) / _bytes(problem, n))
    for name in saving:
        for layer in problem.backward_order:
            if not _saves(problem, stage[layer], name):
                continue
            chunk = problem.chunk_of(layer)
            for window in reversed(windows[chunk]):
                work = problem.work_ns(name, window)
                if work > room[chunk, window] or not problem.serves(window, layer, name):
                    continue
                if single[chunk] and window.kind != "bwd":
                    continue
                if _ready(problem, stage[layer], name, window, orders[chunk]):
                    stage[layer][name] = window
                    room[chunk, window] -= work
                    break


def _ready(
    problem: StageProblem,
    made: dict[str, Choice],
    name: str,
    window: Window,
    order: dict[Window, int],
) -> bool:
    """Whether what ``name`` reads is there in ``window``, and nobody reads ``name`` before."""
    for source in problem.graph.inputs_of(name):
        choice = made.get(source)
        if isinstance(choice, Window) and order[choice] > order[window]:
            return False
    for storage in problem.graph.produced_by(name):
        for reader in problem.graph.readers(storage.name):
            choice = made.get(reader)
            if isinstance(choice, Window) and order[choice] < order[window]:
                return False
    return True
