"""Times of a job from its shape and a device's rates: a roofline, region by region.

Every region is a short list of kernels, which the description of the layer gives; a kernel takes the
longer of its arithmetic and its memory traffic, plus its launch. A measured ``CostTable`` replaces all
of this.
"""

from __future__ import annotations

from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.hardware import Cluster, Device, Host, Link
from megatron_lynx.layers import kind_of
from megatron_lynx.layers.dense import Sizes
from megatron_lynx.layers.kind import Kernel, LayerKind, Work
from megatron_lynx.spec import Batch, Model, Parallel

ATTENTION_DROPOUT = 1.6
"""How much longer fused attention takes if it draws a dropout mask (and its backward is deterministic):
calibrated on Megatron's ``gpt3_7b_tp4_pp1_memory_speed`` on A100 and H100 together; the rates of devices
are of kernels without dropout."""

EMBEDDING_KERNELS, HEAD_KERNELS = 5, 12
"""Kernels of the embedding and of the head, of the loss among them, in either direction."""


def estimate_costs(
    model: Model, parallel: Parallel, batch: Batch, cluster: Cluster, *, fused: bool = True
) -> CostTable:
    """Times of every region, collective and transfer of the job on ``cluster``; ``fused`` as
    ``--no-gradient-accumulation-fusion`` is not given."""
    device, link = cluster.device, cluster.tensor_link(parallel.tp)
    sizes, kind = Sizes.of(model, parallel, batch), kind_of(model)
    work, graph = kind.work(model, parallel, batch), kind.graph(model, parallel, batch)
    slower = ATTENTION_DROPOUT if model.attention_dropout else 1.0
    layer = LayerCosts(
        forward_ns=_times(work.forward, device, slower=slower),
        dgrad_ns=_times(work.dgrad, device, slower=slower, attends_backward=True),
        wgrad_ns=_weight_gradient_times(work.wgrad, device, model, fused=fused),
        collective_ns=collective_times(kind, parallel, sizes.gathered, link),
        beside=tuple(sorted(kind.beside)),
        contention=link.contention if parallel.tp > 1 else 1.0,
    )
    embedding = _embedding_times(model, parallel, batch, cluster)
    head_forward, head_backward, head_window = _head_times(model, parallel, batch, cluster, layer)
    # A layer of multi-token prediction runs beside the head: a projection of two rows to one, and a head too.
    e = model.dtype_bytes
    joined = Kernel.product(sizes.tokens, 2 * model.hidden_size, model.hidden_size // parallel.tp, e)
    joined_ns = device.compute_ns(joined.flops, joined.size_bytes, gemm=joined.gemm)
    head_forward += model.mtp_num_layers * (layer.layer_forward_ns + joined_ns + head_forward)
    head_backward += model.mtp_num_layers * (layer.layer_backward_ns + 2 * joined_ns + head_backward)
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


def _times(work: Work, device: Device, *, slower: float, attends_backward: bool = False) -> dict[str, int]:
    """Times of the kernels of each region; those of fused attention are ``slower``."""
    found = dict.fromkeys(work, 0)
    for region, kernels in work.items():
        for k in kernels:
            backward = attends_backward and k.attention
            one = device.compute_ns(
                k.flops, k.size_bytes, attention=k.attention, backward=backward, gemm=k.gemm
            )
            found[region] += round(one * slower) if k.attention else one
    return found


def _weight_gradient_times(work: Work, device: Device, model: Model, *, fused: bool) -> dict[str, int]:
    """Weight gradients; where the product does not add to the buffer itself, another kernel reads what it
    wrote and the buffer, and writes that."""
    found = {}
    for region, kernels in work.items():
        found[region] = 0
        for k in kernels:
            found[region] += device.compute_ns(k.flops, k.size_bytes, backward=True, gemm=k.gemm)
            if not fused and k.gemm is not None:
                found[region] += device.compute_ns(0, k.gemm[0] * k.gemm[1] * (model.dtype_bytes + 2 * 4))
    return found


def host_costs(kind: LayerKind, model: Model, parallel: Parallel, batch: Batch, host: Host) -> CostTable:
    """The same table in time of the host, which launches every kernel: those of a layer, a kernel that adds
    each weight gradient, and a fixed number for the embedding, the head and their backwards."""
    work, one = kind.work(model, parallel, batch), host.kernel_ns
    waits = [f"fwd:{slot}" for slot in kind.forward_slots(parallel)]
    waits += [f"bwd:{slot}" for slot in kind.backward_slots(parallel)]
    return CostTable(
        layer=LayerCosts(
            forward_ns={region: len(kernels) * one for region, kernels in work.forward.items()},
            dgrad_ns={region: len(kernels) * one for region, kernels in work.dgrad.items()},
            wgrad_ns={region: 2 * len(kernels) * one for region, kernels in work.wgrad.items()},
            collective_ns=dict.fromkeys(waits, 0),
            beside=tuple(sorted(kind.beside)),
        ),
        p2p_ns=host.transfer_ns if parallel.pp > 1 else 0,
        embedding_forward_ns=EMBEDDING_KERNELS * one,
        embedding_backward_ns=EMBEDDING_KERNELS * one,
        head_forward_ns=HEAD_KERNELS * one,
        head_backward_ns=HEAD_KERNELS * one,
        graph="",
        source="host",
    )


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
    gemm_ns = device.compute_ns(gemm.flops, gemm.size_bytes, gemm=gemm.gemm)
    wgrad_ns = device.compute_ns(wgrad.flops, wgrad.size_bytes, backward=True, gemm=wgrad.gemm)
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
