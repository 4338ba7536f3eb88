"""Times of a job from its shape and a device's rates: a roofline, region by region.

Symbols as in ``gpt.py``: s sequence, b microbatch, h hidden, a heads, g query groups, d head width,
f MLP width, t tensor-parallel size, e bytes of an element. Every region is a short list of kernels;
a kernel takes the longer of its arithmetic and its memory traffic, plus its launch. Forward FLOPs
of a layer without its elementwise work are 24bsh^2(1 + s/6h)/t, as in arXiv 2205.05198 (appendix
A); causal flash attention does half of the attention term. A measured ``CostTable`` replaces all
of this.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.hardware import Cluster, Device, Link
from megatron_lynx.layers.local import backward_slots, forward_slots, layer_graph
from megatron_lynx.spec import Batch, Model, Parallel

FLASH_BACKWARD = 2.5
"""FLOPs of flash attention's backward over its forward: five matrix products for two."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: FLOPs, bytes read and written, and whether it is a fused attention kernel."""

    flops: int
    size_bytes: int
    attention: bool = False


Work = dict[str, tuple[Kernel, ...]]
"""The kernels of each region."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the tensors of one layer on one rank, for one microbatch.

    ``hidden`` is the shard of s x b x h that a rank holds (1/t with sequence parallelism),
    ``gathered`` the whole of it, ``heads`` the attention output, ``qkv`` the fused projection,
    ``wide`` the MLP's inner tensor, ``fc1`` the output of fc1 (twice ``wide`` with SwiGLU),
    ``scores`` one s x s tensor of all heads, ``mask`` a dropout mask of ``hidden``.
    """

    tokens: int
    hidden: int
    gathered: int
    heads: int
    qkv: int
    wide: int
    fc1: int
    scores: int
    mask: int

    @classmethod
    def of(cls, model: Model, parallel: Parallel, batch: Batch) -> _Sizes:
        e, tp = model.dtype_bytes, parallel.tp
        tokens = batch.seq_length * batch.micro_batch_size
        rows = tokens // tp if parallel.sequence_parallel else tokens
        heads, groups = model.num_attention_heads // tp, model.groups // tp
        wide = tokens * model.ffn // tp * e
        return cls(
            tokens=tokens,
            hidden=rows * model.hidden_size * e,
            gathered=tokens * model.hidden_size * e,
            heads=tokens * heads * model.head_size * e,
            qkv=tokens * (heads + 2 * groups) * model.head_size * e,
            wide=wide,
            fc1=wide * 2 if model.swiglu else wide,
            scores=tokens * batch.seq_length * heads * e,
            mask=rows * model.hidden_size * model.mask_bytes if model.hidden_dropout else 0,
        )


def estimate_costs(model: Model, parallel: Parallel, batch: Batch, cluster: Cluster) -> CostTable:
    """Times of every region, collective and transfer of the job on ``cluster``."""
    device, link = cluster.device, cluster.tensor_link(parallel.tp)
    sizes = _Sizes.of(model, parallel, batch)
    layer = LayerCosts(
        forward_ns=_times(forward_work(model, parallel, batch), device),
        dgrad_ns=_times(dgrad_work(model, parallel, batch), device),
        wgrad_ns=_times(wgrad_work(model, parallel, batch), device),
        collective_ns=collective_times(parallel, sizes.gathered, link),
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
        graph=layer_graph(model, parallel, batch).fingerprint(),
        source=f"estimate {cluster.name}",
    )


def collective_times(parallel: Parallel, gathered_bytes: int, link: Link) -> dict[str, int]:
    """Each tensor-parallel wait of a layer: an all-reduce of s x b x h, or with sequence
    parallelism an all-gather or reduce-scatter of it."""
    tp = parallel.tp
    if parallel.sequence_parallel:
        wait = link.gather_ns(gathered_bytes, tp)
    else:
        wait = link.all_reduce_ns(gathered_bytes, tp)
    waits = [f"fwd:{slot}" for slot in forward_slots(parallel)]
    waits += [f"bwd:{slot}" for slot in backward_slots(parallel)]
    return dict.fromkeys(waits, wait)


def _times(work: Work, device: Device) -> dict[str, int]:
    return {
        region: sum(device.compute_ns(k.flops, k.size_bytes, attention=k.attention) for k in kernels)
        for region, kernels in work.items()
    }


def _gemm(tokens: int, inner: int, outer: int, e: int) -> Kernel:
    """A product of [tokens, inner] and [inner, outer]: 2mnk FLOPs, each operand moved once."""
    moved = (tokens * inner + inner * outer + tokens * outer) * e
    return Kernel(2 * tokens * inner * outer, moved)


def _gradient_gemm(tokens: int, inner: int, outer: int, e: int) -> Kernel:
    """The weight gradient of the same product, added to an fp32 buffer (read and written)."""
    moved = tokens * (inner + outer) * e + 2 * 4 * inner * outer
    return Kernel(2 * tokens * inner * outer, moved)


def _linears(model: Model, parallel: Parallel) -> dict[str, tuple[int, int]]:
    """(inner, outer) widths of each linear's GEMM on one rank."""
    tp, d = parallel.tp, model.head_size
    heads, groups = model.num_attention_heads // tp, model.groups // tp
    ffn = model.ffn // tp
    return {
        "linear_qkv": (model.hidden_size, (heads + 2 * groups) * d),
        "linear_proj": (heads * d, model.hidden_size),
        "linear_fc1": (model.hidden_size, ffn * (2 if model.swiglu else 1)),
        "linear_fc2": (ffn, model.hidden_size),
    }


def forward_work(model: Model, parallel: Parallel, batch: Batch) -> Work:
    """Kernels of each region's forward.

    A bias-dropout-add reads two tensors and writes one; its drawing of the mask is a region of its
    own, which writes the mask and what it masks.
    """
    z, e = _Sizes.of(model, parallel, batch), model.dtype_bytes
    linears = {
        name: (_gemm(z.tokens, inner, outer, e),)
        for name, (inner, outer) in _linears(model, parallel).items()
    }
    norm = (Kernel(0, 2 * z.hidden),)
    draw = {"self_attn_dropout": (Kernel(0, z.hidden + z.mask),)} if z.mask else {}
    draw_mlp = {"mlp_dropout": (Kernel(0, z.hidden + z.mask),)} if z.mask else {}
    add = (Kernel(0, (2 if z.mask else 3) * z.hidden),)
    return {
        "input_layernorm": norm,
        "linear_qkv": linears["linear_qkv"],
        "qkv_split": _split_work(model, parallel, batch),
        "core_attention": _attention_forward(model, batch, z),
        "linear_proj": linears["linear_proj"],
        **draw,
        "self_attn_bda": add,
        "pre_mlp_layernorm": norm,
        "linear_fc1": linears["linear_fc1"],
        "activation": _activation_forward(model, z),
        "linear_fc2": linears["linear_fc2"],
        **draw_mlp,
        "mlp_bda": add,
    }


def dgrad_work(model: Model, parallel: Parallel, batch: Batch) -> Work:
    """Kernels of each region's backward that are not a weight-gradient GEMM.

    A norm reads its input and the gradient and writes one; a bias-dropout-add reads the gradient
    and the mask, writes one, and adds the gradients of the two branches it joins.
    """
    z, e = _Sizes.of(model, parallel, batch), model.dtype_bytes
    linears = {
        name: (_gemm(z.tokens, outer, inner, e),)
        for name, (inner, outer) in _linears(model, parallel).items()
    }
    norm = (Kernel(0, 3 * z.hidden),)
    unmask = {"self_attn_dropout": (Kernel(0, 2 * z.hidden + z.mask),)} if z.mask else {}
    unmask_mlp = {"mlp_dropout": (Kernel(0, 2 * z.hidden + z.mask),)} if z.mask else {}
    add = (Kernel(0, 3 * z.hidden),)
    return {
        "input_layernorm": norm,
        "linear_qkv": linears["linear_qkv"],
        "qkv_split": _split_work(model, parallel, batch) or (Kernel(0, 2 * z.qkv),),
        "core_attention": _attention_backward(model, batch, z),
        "linear_proj": linears["linear_proj"],
        **unmask,
        "self_attn_bda": add,
        "pre_mlp_layernorm": norm,
        "linear_fc1": linears["linear_fc1"],
        "activation": _activation_backward(model, z),
        "linear_fc2": linears["linear_fc2"],
        **unmask_mlp,
        "mlp_bda": add,
    }


def wgrad_work(model: Model, parallel: Parallel, batch: Batch) -> Work:
    """The weight-gradient GEMM of each linear."""
    tokens = batch.seq_length * batch.micro_batch_size
    return {
        name: (_gradient_gemm(tokens, inner, outer, model.dtype_bytes),)
        for name, (inner, outer) in _linears(model, parallel).items()
    }


def _split_work(model: Model, parallel: Parallel, batch: Batch) -> tuple[Kernel, ...]:
    """Views cost nothing; the rotary embedding (or a copy for GQA) moves what it writes twice."""
    graph = layer_graph(model, parallel, batch)
    copied = sum(s.size_bytes for s in graph.produced_by("qkv_split"))
    kernels = 2 if model.position_embedding_type == "rope" else 1
    return (Kernel(0, 2 * copied // kernels),) * kernels if copied else ()


def _attention_forward(model: Model, batch: Batch, z: _Sizes) -> tuple[Kernel, ...]:
    """Two products of s x s x d per head. Flash: one causal kernel, half of them. Unfused: all of
    them, with the scores, the softmax and the dropped probabilities going through memory."""
    product = 2 * batch.seq_length * z.heads // model.dtype_bytes
    if model.attention == "flash":
        return (Kernel(product, z.qkv + z.heads, attention=True),)
    wide = 2 if model.attention_softmax_in_fp32 else 1
    kernels = [
        Kernel(product, z.qkv + z.scores),
        Kernel(0, z.scores * (1 + wide)),
    ]
    if model.attention_dropout:
        mask = z.scores // model.dtype_bytes * model.mask_bytes
        kernels.append(Kernel(0, z.scores * (1 + wide) + mask))
    return (*kernels, Kernel(product, z.scores + 2 * z.heads), Kernel(0, 2 * z.heads))


def _attention_backward(model: Model, batch: Batch, z: _Sizes) -> tuple[Kernel, ...]:
    """Two products for each of the forward's; flash recomputes one more."""
    product = 2 * batch.seq_length * z.heads // model.dtype_bytes
    if model.attention == "flash":
        return (Kernel(int(FLASH_BACKWARD * product), 2 * (z.qkv + z.heads), attention=True),)
    wide = 2 if model.attention_softmax_in_fp32 else 1
    kernels = [Kernel(product, z.scores + 2 * z.heads), Kernel(product, z.scores + 2 * z.heads)]
    if model.attention_dropout:
        mask = z.scores // model.dtype_bytes * model.mask_bytes
        kernels.append(Kernel(0, 2 * z.scores + mask))
    kernels.append(Kernel(0, z.scores * (1 + 2 * wide)))
    return (*kernels, *(Kernel(product, z.scores + 2 * z.heads),) * 2, Kernel(0, 2 * z.qkv))


def _activation_forward(model: Model, z: _Sizes) -> tuple[Kernel, ...]:
    """Fused: read fc1's output, write the MLP's inner tensor. Unfused: a kernel per operation."""
    fused = (Kernel(0, z.fc1 + z.wide),)
    if model.fused_activation:
        return fused
    bias = (Kernel(0, 2 * z.fc1),) if model.add_bias_linear else ()
    if not model.swiglu:
        return (*bias, *fused)
    return (*bias, Kernel(0, 2 * z.wide), Kernel(0, 2 * z.wide), Kernel(0, 3 * z.wide))


def _activation_backward(model: Model, z: _Sizes) -> tuple[Kernel, ...]:
    fused = (Kernel(0, 2 * z.fc1 + z.wide),)
    if model.fused_activation:
        return fused
    bias = (Kernel(0, z.fc1),) if model.add_bias_linear else ()
    if not model.swiglu:
        return (*bias, *fused)
    return (*bias, Kernel(0, 5 * z.wide), Kernel(0, 3 * z.wide), Kernel(0, 2 * z.fc1))


def _embedding_times(model: Model, parallel: Parallel, batch: Batch, cluster: Cluster) -> tuple[int, int]:
    """Look the rows up (and add positions), reduce over the vocabulary's shards, drop out.

    Backward: gather the gradient with sequence parallelism, add it to the fp32 gradient rows.
    """
    z, device, link = _Sizes.of(model, parallel, batch), cluster.device, cluster.tensor_link(parallel.tp)
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
    z, device, link = _Sizes.of(model, parallel, batch), cluster.device, cluster.tensor_link(parallel.tp)
    e, tp, vocabulary = model.dtype_bytes, parallel.tp, padded_vocabulary(model, parallel) // parallel.tp
    gemm = _gemm(z.tokens, model.hidden_size, vocabulary, e)
    wgrad = _gradient_gemm(z.tokens, model.hidden_size, vocabulary, e)
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
