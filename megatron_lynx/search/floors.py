"""Bounds of a configuration, before anything is planned: of its step for any split and any plan, and
whether its weights and the inputs of its chunks fit at all.

The step, with n_r layers on rank r (F and B a layer's forward and backward without recomputation, m
microbatches, E_r what the embedding or the head adds): a rank cannot begin before a microbatch has come
through those before it, with a layer each at least, and its last backward has to go back through them

    T >= r (F + B + 2 p2p) + m (n_r (F + B) + E_r)

which holds for some split only if T is large enough for the n_r to add up to all layers. Without chunks
a rank's load x_r delays the ones after it too: T >= x_0 + .. + x_(r-1) + m x_r. At best all are
equalities, then x_r = T/m (1 - 1/m)^r, and the sum X of all loads gives

    T >= X / (1 - (1 - 1/m)^p)
"""

from __future__ import annotations

from megatron_lynx.graph import INPUT
from megatron_lynx.job import Job
from megatron_lynx.schedule import in_flight


def step_floor_ns(job: Job, again_ns: int = 0) -> int:
    """A time of a step, with the optimizer, that no split and no plan can beat.

    ``again_ns`` is what a method rebuilds at least on the critical path, for every layer.
    """
    costs, layers, pp, m = job.costs, job.model.num_layers, job.parallel.pp, job.microbatches
    layer = costs.layer.layer_forward_ns + costs.layer.layer_backward_ns + again_ns
    ends = [0] * pp
    ends[0] += costs.embedding_forward_ns + costs.embedding_backward_ns
    ends[-1] += costs.head_forward_ns + costs.head_backward_ns
    ways = [rank * (layer + 2 * costs.p2p_ns) + (ends[0] if rank else 0) for rank in range(pp)]
    low, high = 0, ways[-1] + m * (layers * layer + sum(ends))
    while low < high:
        middle = (low + high) // 2
        room = [(middle - way - m * end) // (m * layer) for way, end in zip(ways, ends, strict=True)]
        if min(room) >= job.parallel.vpp and sum(room) >= layers:
            high = middle
        else:
            low = middle + 1
    if job.parallel.vpp == 1:
        low = max(low, int((layers * layer + sum(ends)) / (1 - (1 - 1 / m) ** pp) * (1 - 1e-9)))
    fewest = -(-layers // pp)
    parameters = min(job.footprint(rank, fewest).parameters for rank in {0, pp // 2, pp - 1})
    return low + job.step_ns(parameters)


def may_fit(job: Job) -> bool:
    """Whether some split leaves each rank room for what no plan can drop: what is static, and the input
    of each chunk for every microbatch in flight."""
    pp, vpp, layers = job.parallel.pp, job.parallel.vpp, job.model.num_layers
    size = sum(s.size_bytes for s in job.graph.storages if s.producer == INPUT)
    statics = {
        rank: [job.footprint(rank, n).static_bytes for n in (vpp, vpp + 1)] for rank in {0, pp // 2, pp - 1}
    }
    room = 0
    for rank in range(pp):
        one, two = statics[rank if rank in (0, pp - 1) else pp // 2]
        inputs = size * sum(in_flight(job.parallel, job.microbatches, rank))
        left = job.memory_bytes - inputs - one
        if left < 0:
            return False
        room += vpp + left // max(1, two - one)
    return room >= layers
