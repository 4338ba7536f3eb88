"""Bounds of a configuration, before anything is planned: of its step for any split and any plan, and
whether some split can fit at all.

The step, with n_r layers on rank r (F and B a layer's forward and backward without recomputation, m
microbatches, E_r what the embedding or the head adds, X_r what is rebuilt and not hidden): a rank cannot
begin before a microbatch has come through those before it, with a layer each at least, and its last
backward has to go back through them

    T >= r (F + B + 2 p2p) + m (n_r (F + B) + E_r + X_r)

which holds for some split only if T is large enough for the n_r to add up to all layers. X_r follows from
memory. With a_c microbatches of chunk c alive, the rank holds at least the bytes k that a layer saves

    k (sum a_c + (n_r - v) min a_c)

times, v chunks with a layer each at least. What is over what the weights leave has to be dropped; a layer
drops first what is cheapest to run again for its size, at best in part, and that work, less all that the
collectives leave of time, is X_r. (What runs while the rank waits for another is work on it all the same.)

Without chunks a rank's load x_r delays the ones after it too: T >= x_0 + .. + x_(r-1) + m x_r. At best all
are equalities, then x_r = T/m (1 - 1/m)^r, and the sum X of all loads gives

    T >= X / (1 - (1 - 1/m)^p)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.graph import INPUT
from megatron_lynx.job import Job
from megatron_lynx.layers import kind_of
from megatron_lynx.plan import Window
from megatron_lynx.schedule import in_flight

Row = NDArray[np.float64]
"""A number for each number of layers that a rank may hold."""

Grid = NDArray[np.float64]
"""A row for each rank."""

_BELOW = 1 - 1e-9
"""Bounds are in floating point; this much less is one in any case."""

_NEAR = 1 - 1e-4
"""Where the search for the least time of a step ends: below it."""


class Floor:
    """The bounds of one job. ``fits`` says whether some split can fit."""

    def __init__(self, job: Job) -> None:
        self._job = job
        pp, layers, vpp = job.parallel.pp, job.model.num_layers, job.parallel.vpp
        self._counts = np.arange(vpp, layers - (pp - 1) * vpp + 1, dtype=np.float64)
        self._again = self._rebuilt()
        self._most = np.isfinite(self._again).sum(axis=1) + vpp - 1
        self.fits = bool((self._most >= vpp).all() and self._most.sum() >= layers)

    def _rebuilt(self) -> Grid:
        """What a rank runs again at least for one microbatch, in ns; endless where it cannot fit."""
        job, found = self._job, []
        over, pieces = self._static() - job.memory_bytes, _pieces(job)
        for rank in range(job.parallel.pp):
            alive = in_flight(job.parallel, job.microbatches, rank)
            found.append(_least_again(pieces, alive, self._counts, over[rank]))
        return np.array(found)

    def _static(self) -> Grid:
        """What is static on each rank."""
        job, first = self._job, self._job.parallel.vpp
        found = {}
        for rank in {0, job.parallel.pp // 2, job.parallel.pp - 1}:
            one, two = (job.footprint(rank, n).static_bytes for n in (first, first + 1))
            found[rank] = one + (self._counts - first) * (two - one)
        last = job.parallel.pp - 1
        return np.array(
            [found[rank if rank in (0, last) else job.parallel.pp // 2] for rank in range(last + 1)]
        )

    def step_ns(self, again_ns: int = 0, *, hides: bool = True) -> int:
        """A time of a step, with the optimizer, that no split and no plan can beat.

        ``again_ns`` is what a method rebuilds at least on the critical path, for every layer. ``hides``:
        work may be hidden in the waits for collectives, which Megatron's own options do not.
        """
        job, costs, m, counts = self._job, self._job.costs, self._job.microbatches, self._counts
        pp, layers = job.parallel.pp, job.model.num_layers
        layer = costs.layer.layer_forward_ns + costs.layer.layer_backward_ns
        ends = np.zeros((pp, 1))
        ends[0] += costs.embedding_forward_ns + costs.embedding_backward_ns
        ends[-1] += costs.head_forward_ns + costs.head_backward_ns
        ways = np.arange(pp).reshape(pp, 1) * (layer + again_ns + 2 * costs.p2p_ns)
        ways[1:] += round(ends[0, 0])
        hidden = np.outer(np.ones(pp), counts * _waits_ns(job))
        hidden[-1] += costs.head_window_ns
        exposed = np.maximum(counts * again_ns, self._again - hidden * hides)
        spent = (ways + m * (counts * layer + ends + np.maximum(exposed, 0))) * _BELOW
        low, high = 0, int(spent[np.isfinite(spent)].max(initial=0))
        while low < high * _NEAR:
            middle = (low + high) // 2
            rooms = (spent <= middle).sum(axis=1)
            if rooms.min() > 0 and rooms.sum() + pp * (job.parallel.vpp - 1) >= layers:
                high = middle
            else:
                low = middle + 1
        if job.parallel.vpp == 1:
            load = layers * (layer + again_ns) + ends.sum()
            low = max(low, int(load / (1 - (1 - 1 / m) ** pp) * _BELOW))
        fewest = -(-layers // pp)
        parameters = min(job.footprint(rank, fewest).parameters for rank in {0, pp // 2, pp - 1})
        return low + job.step_ns(parameters)


Piece = tuple[int, int, bool]
"""Bytes that are saved for a region, the time to run it again, and whether it is the layer's input, which
comes again by the end of the layer before, and so not in a chunk's first layer."""


def _pieces(job: Job) -> list[Piece]:
    """What a layer saves."""
    graph, times = job.graph, job.costs.layer.forward_ns
    return [
        (size, times.get(graph.names[-1] if name == INPUT else name, 0), name == INPUT)
        for name, size in graph.kept_by_region().items()
        if size
    ]


def _least_again(pieces: Sequence[Piece], alive: Sequence[int], counts: Row, over: Row) -> Row:
    """The least time to run again what a rank has to drop, by its number of layers; endless if all that can
    be dropped is not enough.

    ``over`` is what its weights take more than there is room. A layer of each chunk counts as often as the
    chunk is alive, the others as often as the chunk that is alive least.
    """
    values, chunks = np.unique(alive, return_counts=True)
    others = np.array([float(i == 0) for i in range(len(values))])
    parts = [
        (again / (size * value), size * value, again, 0.0 if first else own, other)
        for size, again, first in pieces
        for value, own, other in zip(values.tolist(), chunks.tolist(), others.tolist(), strict=True)
    ]
    _, sizes, times, own, other = np.array(sorted(parts)).T
    often = own + np.outer(counts - len(alive), other)
    freed, spent = np.cumsum(often * sizes, axis=1), np.cumsum(often * times, axis=1)
    saved = sum(size for size, _, _ in pieces)
    need = over + saved * (sum(alive) + (counts - len(alive)) * min(alive))
    whole = (freed < need[:, None]).sum(axis=1)  # pieces that are dropped whole
    last = np.minimum(whole, len(sizes) - 1)
    rows = np.arange(len(counts))
    before = np.where(last > 0, freed[rows, last - 1], 0.0), np.where(last > 0, spent[rows, last - 1], 0.0)
    rest = np.maximum(need - before[0], 0.0) * times[last] / sizes[last]
    return np.where(whole < len(sizes), before[1] + rest, np.inf)


def _waits_ns(job: Job) -> int:
    """How long a layer's forward and backward wait for collectives."""
    kind, costs = kind_of(job.model), job.costs.layer
    slots = [Window("fwd", 0, slot) for slot in kind.forward_slots(job.parallel)]
    slots += [Window("bwd", 0, slot) for slot in kind.backward_slots(job.parallel)]
    return sum(map(costs.window_ns, slots))
