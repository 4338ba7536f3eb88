"""What kinds of dense layers share: a norm and attention, a norm and an MLP, each with a residual.

Symbols as in arXiv 2205.05198: s sequence, b microbatch, h hidden, a heads, g query groups, d head
width, f MLP width, t tensor-parallel size, e bytes of an element. With sequence parallelism the layer's
own tensors hold s/t rows. Forward FLOPs of a layer without its elementwise work are
24bsh^2(1 + s/6h)/t, as there (appendix A); causal flash attention does half of the attention term.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.layers.kernels import attention_kernel, softmax_bytes
from megatron_lynx.layers.kind import Kernel, LayerWork, Mask, Part, parts_with
from megatron_lynx.spec import Batch, Model, Parallel

CUTS = ("linear_fc1", "linear_qkv")
"""A layer's backward in three phases: what comes before the two waits for an input gradient (or, with
sequence parallelism, the waits at those two linears), where most of a half layer is gone."""

BESIDE = frozenset(("linear_qkv", "linear_fc1"))
"""The linears that are split by column."""

PARENTS = {"self_attention": ("SelfAttention",), "mlp": ("MLP",)}
"""Modules that hold submodules of a dense layer."""

WITHIN = ("FusedLayerNorm", "WrappedTorchNorm", "LayerNorm", "RMSNorm", "TENorm", "TEActivationOp")
"""Modules that run between two submodules: norms of queries and keys, an activation."""

RECOMPUTE_MODULES = {
    "core_attn": ("core_attention",),
    "mlp": ("linear_fc1", "activation", "linear_fc2"),
    "layernorm": ("input_layernorm", "pre_mlp_layernorm"),
}

FLASH_BACKWARD = 2.5
"""FLOPs of flash attention's backward over its forward: five matrix products for two."""


def forward_slots(parallel: Parallel) -> tuple[str, ...]:
    """Regions of a layer whose forward waits for a tensor-parallel collective, in order."""
    if parallel.tp == 1:
        return ()
    if parallel.sequence_parallel:
        return ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    return ("linear_proj", "linear_fc2")


def backward_slots(parallel: Parallel) -> tuple[str, ...]:
    """Waits for a tensor-parallel collective in a layer's backward, in the order they come.

    Without sequence parallelism these are the all-reduces of the two input gradients. With it,
    each half layer gathers the gradient of its output, gathers its saved input again, and
    reduce-scatters the gradient of that input.
    """
    if parallel.tp == 1:
        return ()
    if parallel.sequence_parallel:
        return (
            "linear_fc2",
            "linear_fc1.gather",
            "linear_fc1.scatter",
            "linear_proj",
            "linear_qkv.gather",
            "linear_qkv.scatter",
        )
    return ("linear_fc1", "linear_qkv")


_READS = {
    "input_layernorm": ("input",),
    "qkv_split": ("linear_qkv.out",),
    "core_attention": ("qkv_split.queries", "qkv_split.keys", "linear_qkv.out"),
    "output_gate": ("linear_qkv.out", "core_attention.out"),
    "self_attn_bda": ("input", "linear_proj.out"),
    "pre_mlp_layernorm": ("self_attn_bda.out",),
    "activation": ("linear_fc1.out",),
    "linear_fc2": ("activation.out",),
    "mlp_bda": ("self_attn_bda.out", "linear_fc2.out"),
}
"""What a region needs to run again, where kinds do not differ."""


def assemble(
    model: Model,
    parallel: Parallel,
    parts: tuple[Part, ...],
    storages: Iterable[Storage],
    reads: Mapping[str, tuple[str, ...]],
    *,
    attention_draws: bool,
) -> LayerGraph:
    """The graph of a layer of ``parts`` with those ``storages`` that hold something; ``reads`` completes
    what regions need to run again."""
    masked, gate = model.hidden_dropout > 0, model.attention_output_gate
    parts = tuple(p for p in parts_with(parts, model) if masked or not isinstance(p, Mask))
    names = (INPUT, *(part.name for part in parts))
    held = tuple(s for s in storages if s.size_bytes and s.producer in names)
    made = {storage.name for storage in held}
    masks = {part.name for part in parts if isinstance(part, Mask)}
    masks |= {part.inside for part in parts if isinstance(part, Mask)}
    talks = {*forward_slots(parallel), *([INPUT] if parallel.tp > 1 else [])}
    talks |= {"core_attention"} if parallel.cp > 1 else set()
    needs = {**_READS, "linear_proj": ("output_gate.out" if gate else "core_attention.out",), **reads}
    regions = tuple(
        Region(
            name=name,
            reads=tuple(read for read in needs.get(name, ()) if read in made),
            communicates=name in talks,
            draws=attention_draws if name == "core_attention" else name in masks,
        )
        for name in names
    )
    return LayerGraph(regions=regions, storages=held, cuts=CUTS)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the tensors of one layer on one rank, for one microbatch.

    ``hidden`` is the shard of s x b x h that a rank holds (1/t with sequence parallelism),
    ``gathered`` the whole of it, ``heads`` the attention output, ``qkv`` the fused projection,
    ``wide`` the MLP's inner tensor, ``fc1`` the output of fc1 (twice ``wide`` with a gate),
    ``scores`` one s x s tensor of all heads, ``softmax`` one in the type in which unfused attention
    computes its softmax, ``mask`` a dropout mask of ``hidden``.
    """

    tokens: int
    hidden: int
    gathered: int
    heads: int
    qkv: int
    wide: int
    fc1: int
    scores: int
    softmax: int
    mask: int

    @classmethod
    def of(cls, model: Model, parallel: Parallel, batch: Batch) -> Sizes:
        """The sizes of one job."""
        e, tp = model.dtype_bytes, parallel.tp
        tokens = parallel.tokens(batch)
        rows = tokens // tp if parallel.sequence_parallel else tokens
        heads = model.num_attention_heads // tp
        wide = tokens * model.ffn // tp * e
        return cls(
            tokens=tokens,
            hidden=rows * model.hidden_size * e,
            gathered=tokens * model.hidden_size * e,
            heads=tokens * heads * model.head_size * e,
            qkv=tokens * _qkv_width(model, tp) * e,
            wide=wide,
            fc1=wide * 2 if model.gated else wide,
            scores=tokens * batch.seq_length * heads * e,
            softmax=tokens * batch.seq_length * heads * softmax_bytes(model, tp, batch),
            mask=rows * model.hidden_size * model.mask_bytes if model.hidden_dropout else 0,
        )


def _qkv_width(model: Model, tp: int) -> int:
    """Width of the fused QKV output on one rank; an output gate comes with it."""
    heads, groups = model.num_attention_heads // tp, model.groups // tp
    return (heads * (2 if model.attention_output_gate else 1) + 2 * groups) * model.head_size


def _linears(model: Model, parallel: Parallel) -> dict[str, tuple[int, int]]:
    """(inner, outer) widths of each linear's GEMM on one rank."""
    tp, d = parallel.tp, model.head_size
    heads, ffn = model.num_attention_heads // tp, model.ffn // tp
    return {
        "linear_qkv": (model.hidden_size, _qkv_width(model, tp)),
        "linear_proj": (heads * d, model.hidden_size),
        "linear_fc1": (model.hidden_size, ffn * (2 if model.gated else 1)),
        "linear_fc2": (ffn, model.hidden_size),
    }


def parameters(model: Model, tp: int) -> int:
    """Parameters of one layer on one rank: four linears, their biases, two norms.

    Without GQA and with f = 4h their sum over ranks is 12h^2 + 13h. Biases of ``linear_proj`` and
    ``linear_fc2`` and the norms are on every rank.
    """
    linears = _linears(model, Parallel(tp=tp))
    matrices = sum(inner * outer for inner, outer in linears.values())
    biases = sum(outer for _, outer in linears.values()) if model.add_bias_linear else 0
    return matrices + biases + 2 * model.norm_parameters + _extra_parameters(model, tp)


def _extra_parameters(model: Model, tp: int) -> int:
    """Norms of queries and of keys, one head wide, and the softmax's offset of each head."""
    shift = 2 if model.normalization == "LayerNorm" else 1
    norms = 2 * shift * model.head_size if model.qk_layernorm else 0
    return norms + (model.num_attention_heads // tp if model.softmax_type == "learnable" else 0)


def workspace_bytes(model: Model, parallel: Parallel, batch: Batch) -> tuple[int, ...]:
    """What one layer's backward needs besides saved storages, phase by phase (``CUTS``): the
    gradients alive at once.

    The residual's gradient all the time. Before fc1, the gradients of its output and of the MLP's
    inner tensor. From fc1 on, the larger of its own and those of attention (with unfused attention,
    of two s x s tensors in the softmax's type). From the QKV linear on, those of its output and input.
    """
    z = Sizes.of(model, parallel, batch)
    mlp = z.wide + z.fc1 + z.gathered
    attention = z.heads + z.qkv + z.gathered
    if attention_kernel(model) == "unfused":
        attention += 2 * z.softmax
    return z.hidden + mlp, z.hidden + max(z.fc1 + z.gathered, attention), z.hidden + z.qkv + z.gathered


def work(model: Model, parallel: Parallel, batch: Batch, graph: LayerGraph) -> LayerWork:
    """The kernels of a layer with this ``graph``."""
    z, e = Sizes.of(model, parallel, batch), model.dtype_bytes
    linears = _linears(model, parallel).items()
    split = _split(model, graph)
    return LayerWork(
        forward={
            **{name: (Kernel.product(z.tokens, inner, outer, e),) for name, (inner, outer) in linears},
            **_forward_elementwise(z),
            "qkv_split": split,
            "core_attention": _attention_forward(model, batch, z),
            **({"output_gate": (Kernel(0, 3 * z.heads),)} if model.attention_output_gate else {}),
            "activation": _activation_forward(model, z),
        },
        dgrad={
            **{
                name: (Kernel.product(z.tokens, outer, inner, e), *_bias_gradient(model, z, outer))
                for name, (inner, outer) in linears
            },
            **_backward_elementwise(z),
            "qkv_split": split or (Kernel(0, 2 * z.qkv),),
            "core_attention": _attention_backward(model, batch, z),
            **({"output_gate": (Kernel(0, 5 * z.heads),)} if model.attention_output_gate else {}),
            "activation": _activation_backward(model, z),
        },
        wgrad={n: (Kernel.weight_gradient(z.tokens, inner, outer, e),) for n, (inner, outer) in linears},
    )


def _bias_gradient(model: Model, z: Sizes, outer: int) -> tuple[Kernel, ...]:
    """The gradient of a bias is the sum of the output's gradient over all tokens."""
    return (Kernel(0, z.tokens * outer * model.dtype_bytes),) if model.add_bias_linear else ()


def _forward_elementwise(z: Sizes) -> dict[str, tuple[Kernel, ...]]:
    """Norms, and the bias-dropout-adds: each reads two tensors and writes one; its drawing of the mask
    is a region of its own, which writes the mask and what it masks."""
    norm, draw = (Kernel(0, 2 * z.hidden),), (Kernel(0, z.hidden + z.mask),)
    add = (Kernel(0, (2 if z.mask else 3) * z.hidden),)
    masks = {"self_attn_dropout": draw, "mlp_dropout": draw} if z.mask else {}
    return {
        "input_layernorm": norm,
        "pre_mlp_layernorm": norm,
        "self_attn_bda": add,
        "mlp_bda": add,
        **masks,
    }


def _backward_elementwise(z: Sizes) -> dict[str, tuple[Kernel, ...]]:
    """A norm reads its input and the gradient and writes one; a bias-dropout-add reads the gradient
    and the mask, writes one, and adds the gradients of the two branches it joins."""
    norm = add = (Kernel(0, 3 * z.hidden),)
    unmask = (Kernel(0, 2 * z.hidden + z.mask),)
    masks = {"self_attn_dropout": unmask, "mlp_dropout": unmask} if z.mask else {}
    return {
        "input_layernorm": norm,
        "pre_mlp_layernorm": norm,
        "self_attn_bda": add,
        "mlp_bda": add,
        **masks,
    }


def _split(model: Model, graph: LayerGraph) -> tuple[Kernel, ...]:
    """Views cost nothing; the rotary embedding (or a copy for GQA) moves what it writes twice."""
    copied = sum(s.size_bytes for s in graph.produced_by("qkv_split"))
    kernels = 2 if model.rotary else 1
    return (Kernel(0, 2 * copied // kernels),) * kernels if copied else ()


def _attention_forward(model: Model, batch: Batch, z: Sizes) -> tuple[Kernel, ...]:
    """Two products of s x s x d per head. Flash or fused: one causal kernel, half of them, or with a
    sliding window what it leaves. Unfused: all of them, with the scores, the softmax and the dropped
    probabilities going through memory."""
    product = 2 * batch.seq_length * z.heads // model.dtype_bytes
    if attention_kernel(model) != "unfused":
        product = _seen(model, batch, product)
        return (Kernel(product, z.qkv + z.heads, attention=True),)
    kernels = [
        Kernel(product, z.qkv + z.scores),
        Kernel(0, z.scores + z.softmax),
    ]
    if model.attention_dropout:
        mask = z.scores // model.dtype_bytes * model.mask_bytes
        kernels.append(Kernel(0, z.scores + z.softmax + mask))
    return (*kernels, Kernel(product, z.scores + 2 * z.heads), Kernel(0, 2 * z.heads))


def _attention_backward(model: Model, batch: Batch, z: Sizes) -> tuple[Kernel, ...]:
    """Two products for each of the forward's; flash recomputes one more."""
    product = 2 * batch.seq_length * z.heads // model.dtype_bytes
    if attention_kernel(model) != "unfused":
        product = _seen(model, batch, product)
        return (Kernel(int(FLASH_BACKWARD * product), 2 * (z.qkv + z.heads), attention=True),)
    kernels = [Kernel(product, z.scores + 2 * z.heads), Kernel(product, z.scores + 2 * z.heads)]
    if model.attention_dropout:
        mask = z.scores // model.dtype_bytes * model.mask_bytes
        kernels.append(Kernel(0, 2 * z.scores + mask))
    kernels.append(Kernel(0, z.scores + 2 * z.softmax))
    return (*kernels, *(Kernel(product, z.scores + 2 * z.heads),) * 2, Kernel(0, 2 * z.qkv))


def _seen(model: Model, batch: Batch, product: int) -> int:
    """FLOPs of both causal products, half of two whole ones; a sliding window of w leaves at most w of s
    columns."""
    if model.window_size is None or model.window_size[0] < 0:
        return product
    return min(product, 2 * product * (model.window_size[0] + 1) // batch.seq_length)


def _activation_forward(model: Model, z: Sizes) -> tuple[Kernel, ...]:
    """Fused: read fc1's output, write the MLP's inner tensor. Unfused: a kernel per operation."""
    fused = (Kernel(0, z.fc1 + z.wide),)
    if model.fused_activation:
        return fused
    bias = (Kernel(0, 2 * z.fc1),) if model.add_bias_linear else ()
    if not model.gated:
        return (*bias, *fused)
    return (*bias, Kernel(0, 2 * z.wide), Kernel(0, 2 * z.wide), Kernel(0, 3 * z.wide))


def _activation_backward(model: Model, z: Sizes) -> tuple[Kernel, ...]:
    fused = (Kernel(0, 2 * z.fc1 + z.wide),)
    if model.fused_activation:
        return fused
    bias = (Kernel(0, z.fc1),) if model.add_bias_linear else ()
    if not model.gated:
        return (*bias, *fused)
    return (*bias, Kernel(0, 5 * z.wide), Kernel(0, 3 * z.wide), Kernel(0, 2 * z.fc1))
