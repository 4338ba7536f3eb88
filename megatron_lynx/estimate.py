"""Times of a job from its shape and a device's rates: a roofline, region by region.

Every region is a short list of kernels, which the description of the layer gives; a kernel takes the
longer of its arithmetic and its memory traffic, plus its launch. A measured ``CostTable`` replaces all
of this.
"""

from __future__ import annotations

from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.hardware import Cluster, Device, Link
from megatron_lynx.layers import kind_of
from megatron_lynx.layers.dense import Sizes
from megatron_lynx.layers.kind import Kernel, LayerKind, Work
from megatron_lynx.spec import Batch, Model, Parallel


def estimate_costs(model: Model, parallel: Parallel, batch: Batch, cluster: Cluster) -> CostTable:
    """Times of every region, collective and transfer of the job on ``cluster``."""
    device, link = cluster.device, cluster.tensor_link(parallel.tp)
    sizes, kind = Sizes.of(model, parallel, batch), kind_of(model)
    work, graph = kind.work(model, parallel, batch), kind.graph(model, parallel, batch)
    layer = LayerCosts(
        forward_ns=_times(work.forward, device),
        dgrad_ns=_times(work.dgrad, device),
        wgrad_ns=_times(work.wgrad, device),
        collective_ns=collective_times(kind, parallel, sizes.gathered, link),
        beside=tuple(sorted(kind.beside)),
        contention=link.contention if parallel.tp > 1 else 1.0,
    )
    embedding = _embedding_times(model, parallel, batch, cluster)
    head_forward, head_backward, head_window = _head_times(model, parallel, batch, cluster, layer)
    pipe = cluster.pipeline_link(parallel.tp, parallel.dp, parallel.pp)
    return CostTable(
        layer=layer,
        p2p_ns=pipe.transfer_ns(sizes.hidden) if parallel.pp > 1 else 0,
        embedding_forward_ns=embedding[0],
        embedding_backward_ns=embedding[1],
        head_forward_ns=head_forward,
        head_backward_ns=head_backward,
        head_window_ns=head_window,
        graph=graph.fingerprint(),
        source=f"estimate {cluster.name}",
    )


def collective_times(kind: LayerKind, parallel: Parallel, gathered_bytes: int, link: Link) -> dict[str, int]:
    """Each tensor-parallel wait of a layer: an all-reduce of s x b x h, or with sequence
    parallelism an all-gather or reduce-scatter of it."""
    tp = parallel.tp
    if parallel.sequence_parallel:
        wait = link.gather_ns(gathered_bytes, tp)
    else:
        wait = link.all_reduce_ns(gathered_bytes, tp)
    waits = [f"fwd:{slot}" for slot in kind.forward_slots(parallel)]
    waits += [f"bwd:{slot}" for slot in kind.backward_slots(parallel)]
    return dict.fromkeys(waits, wait)


def _times(work: Work, device: Device) -> dict[str, int]:
    return {
        region: sum(device.compute_ns(k.flops, k.size_bytes, attention=k.attention) for k in kernels)
        for region, kernels in work.items()
    }


def _embedding_times(model: Model, parallel: Parallel, batch: Batch, cluster: Cluster) -> tuple[int, int]:
    """Look the rows up (and add positions), reduce over the vocabulary's shards, drop out.

    Backward: gather the gradient with sequence parallelism, add it to the fp32 gradient rows.
    """
    z, device, link = Sizes.of(model, parallel, batch), cluster.device, cluster.tensor_link(parallel.tp)
    learned = model.position_embedding_type == "learned_absolute"
    forward = device.compute_ns(0, 2 * z.gathered)
    forward += device.compute_ns(0, 3 * z.hidden) if learned else 0
    forward += device.compute_ns(0, 2 * z.hidden + z.mask) if z.mask else 0
    rows = z.gathered // model.dtype_bytes * 4
    backward = device.compute_ns(0, z.gathered + 2 * rows)
    backward += device.compute_ns(0, 2 * z.hidden + z.mask) if z.mask else 0
    if parallel.sequence_parallel:
        forward += link.gather_ns(z.gathered, parallel.tp)
        backward += link.gather_ns(z.gathered, parallel.tp)
    else:
        forward += link.all_reduce_ns(z.gathered, parallel.tp)
    return forward, backward


def _head_times(
    model: Model, parallel: Parallel, batch: Batch, cluster: Cluster, layer: LayerCosts
) -> tuple[int, int, int]:
    """Final norm, output layer, vocabulary-parallel loss; and the wait in the backward.

    The loss reads the logits, works in fp32 over them about four times, and its backward once;
    it reduces three numbers per token over the tensor-parallel group. The wait is the reduction
    of the output layer's input gradient, less the weight-gradient GEMM beside it; with sequence
    parallelism a gather runs beside the input-gradient GEMM (``LayerCosts.overlap``).
    """
    z, device, link = Sizes.of(model, parallel, batch), cluster.device, cluster.tensor_link(parallel.tp)
    e, tp, vocabulary = model.dtype_bytes, parallel.tp, padded_vocabulary(model, parallel) // parallel.tp
    gemm = Kernel.product(z.tokens, model.hidden_size, vocabulary, e)
    wgrad = Kernel.weight_gradient(z.tokens, model.hidden_size, vocabulary, e)
    logits = z.tokens * vocabulary
    gemm_ns = device.compute_ns(gemm.flops, gemm.size_bytes)
    wgrad_ns = device.compute_ns(wgrad.flops, wgrad.size_bytes)
    forward = device.compute_ns(0, 2 * z.hidden) + gemm_ns
    forward += device.compute_ns(0, logits * (e + 4)) + 3 * device.compute_ns(0, logits * 8)
    gather = link.gather_ns(z.gathered, tp) if parallel.sequence_parallel else 0
    forward += 3 * link.all_reduce_ns(4 * z.tokens, tp) + gather
    reduced = layer.overlap(wgrad_ns, gather or link.all_reduce_ns(z.gathered, tp))
    backward = device.compute_ns(0, logits * (e + 8)) + device.compute_ns(0, 3 * z.hidden)
    backward += sum(layer.overlap(gemm_ns, gather)) + sum(reduced)
    return forward, backward, reduced[2]


def padded_vocabulary(model: Model, parallel: Parallel) -> int:
    """The vocabulary as Megatron pads it: to a multiple of 128 times the tensor-parallel size."""
    step = 128 * parallel.tp
    return -(-model.vocab_size // step) * step
