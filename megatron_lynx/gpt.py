"""The graph of one GPT layer of Megatron's local spec, from its shape alone.

Symbols as in arXiv 2205.05198: s sequence, b microbatch, h hidden, a heads, g query groups, d head
width, f MLP width, t tensor-parallel size. With sequence parallelism the layer's own tensors hold
s/t rows. A test traces real layers and compares region by region, for every supported option.
"""

from __future__ import annotations

from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.spec import Batch, Model, Parallel

FORWARD_ORDER = (
    INPUT,
    "input_layernorm",
    "linear_qkv",
    "qkv_split",
    "core_attention",
    "linear_proj",
    "self_attn_dropout",
    "self_attn_bda",
    "pre_mlp_layernorm",
    "linear_fc1",
    "activation",
    "linear_fc2",
    "mlp_dropout",
    "mlp_bda",
)
"""Every region of a layer in forward order.

``qkv_split`` (with the rotary embedding) and ``activation`` are the glue between two submodules;
``self_attn_dropout`` and ``mlp_dropout`` are the masks drawn inside the two bias-dropout-adds,
which can be rebuilt from the random state alone.
"""


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


def layer_graph(model: Model, parallel: Parallel, batch: Batch) -> LayerGraph:
    """Regions and storages of one layer on one tensor-parallel rank, for one microbatch."""
    storages = (*_attention_storages(model, parallel, batch), *_mlp_storages(model, parallel, batch))
    made = {storage.name for storage in storages}
    sp, tp = parallel.sequence_parallel, parallel.tp > 1
    reads: dict[str, tuple[str, ...]] = {
        INPUT: (),
        "input_layernorm": ("input",),
        "linear_qkv": ("input_layernorm.out",),
        "qkv_split": ("linear_qkv.out",),
        "core_attention": ("qkv_split.out", "linear_qkv.out"),
        "linear_proj": ("core_attention.out",),
        "self_attn_dropout": (),
        "self_attn_bda": ("input", "linear_proj.out"),
        "pre_mlp_layernorm": ("self_attn_bda.out",),
        "linear_fc1": ("pre_mlp_layernorm.out",),
        "activation": ("linear_fc1.out",),
        "linear_fc2": ("activation.out",),
        "mlp_dropout": (),
        "mlp_bda": ("self_attn_bda.out", "linear_fc2.out"),
    }
    communicates = {
        "linear_qkv": sp,
        "linear_proj": tp,
        "linear_fc1": sp,
        "linear_fc2": tp,
        INPUT: tp,
    }
    masked = model.hidden_dropout > 0
    draws = {
        "core_attention": model.attention_dropout > 0,
        "self_attn_dropout": masked,
        "self_attn_bda": masked,
        "mlp_dropout": masked,
        "mlp_bda": masked,
    }
    names = [n for n in FORWARD_ORDER if masked or not n.endswith("_dropout")]
    regions = tuple(
        Region(
            name=name,
            reads=tuple(read for read in reads[name] if read in made),
            communicates=communicates.get(name, False),
            draws=draws.get(name, False),
        )
        for name in names
    )
    return LayerGraph(regions=regions, storages=tuple(s for s in storages if s.producer in names))


def _rows(parallel: Parallel, batch: Batch) -> int:
    """Rows (tokens) of the tensors that sequence parallelism splits."""
    rows = batch.seq_length * batch.micro_batch_size
    return rows // parallel.tp if parallel.sequence_parallel else rows


def _norm_stats(name: str, model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    """What a norm saves of its own: mean and 1/deviation, or the root mean square alone."""
    count = 2 if model.normalization == "LayerNorm" else 1
    size = count * _rows(parallel, batch) * 4
    return (Storage(name=f"{name}.stats", producer=name, size_bytes=size, saved_by=(name,)),)


def _attention_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    e, tp = model.dtype_bytes, parallel.tp
    tokens, rows = batch.seq_length * batch.micro_batch_size, _rows(parallel, batch)
    heads, groups, d = model.num_attention_heads // tp, model.groups // tp, model.head_size
    hidden = rows * model.hidden_size * e
    rope = model.position_embedding_type == "rope"
    repeats = heads > groups and model.attention == "unfused"
    copied = 0
    if rope:
        copied = tokens * (heads + groups) * d * e + 4 * batch.seq_length * d * e
    elif repeats and groups > 1:
        copied = tokens * heads * d * e
    found = [
        Storage(name="input", producer=INPUT, size_bytes=hidden, saved_by=("input_layernorm",)),
        Storage(
            name="input_layernorm.out",
            producer="input_layernorm",
            size_bytes=hidden,
            saved_by=("linear_qkv",),
        ),
        *_norm_stats("input_layernorm", model, parallel, batch),
        Storage(
            name="linear_qkv.out",
            producer="linear_qkv",
            size_bytes=tokens * (heads + 2 * groups) * d * e,
            saved_by=() if repeats else ("core_attention",),
        ),
        Storage(
            name="qkv_split.out",
            producer="qkv_split",
            size_bytes=copied,
            saved_by=("core_attention",),
        ),
        *_core_attention_storages(model, parallel, batch, repeats),
        Storage(
            name="core_attention.out",
            producer="core_attention",
            size_bytes=tokens * heads * d * e,
            saved_by=("linear_proj",),
        ),
        Storage(name="linear_proj.out", producer="linear_proj", size_bytes=hidden),
        Storage(
            name="self_attn_dropout.mask",
            producer="self_attn_dropout",
            size_bytes=rows * model.hidden_size * model.mask_bytes,
            saved_by=("self_attn_bda",),
        ),
        Storage(
            name="self_attn_bda.out",
            producer="self_attn_bda",
            size_bytes=hidden,
            saved_by=("pre_mlp_layernorm",),
        ),
    ]
    return tuple(s for s in found if s.size_bytes)


def _core_attention_storages(
    model: Model, parallel: Parallel, batch: Batch, repeats: bool
) -> tuple[Storage, ...]:
    """What attention saves inside: softmax and masks of s x s, or the flash kernel's log-sums."""
    e, heads = model.dtype_bytes, model.num_attention_heads // parallel.tp
    s, b = batch.seq_length, batch.micro_batch_size
    sizes: dict[str, int] = {}
    if model.attention == "flash":
        sizes["core_attention.logsumexp"] = b * heads * s * 4
    else:
        scores = b * heads * s * s
        if repeats:
            sizes["core_attention.repeated_kv"] = 2 * s * b * heads * model.head_size * e
        sizes["core_attention.causal_mask"] = s * s
        wide = 4 if model.attention_softmax_in_fp32 else e
        sizes["core_attention.softmax"] = scores * wide
        if model.attention_dropout > 0:
            sizes["core_attention.dropout_mask"] = scores * model.mask_bytes
            sizes["core_attention.dropped"] = scores * e
        elif wide != e:
            sizes["core_attention.probabilities"] = scores * e
    return tuple(
        Storage(
            name=name, producer="core_attention", size_bytes=size, saved_by=("core_attention",)
        )
        for name, size in sizes.items()
    )


def _mlp_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    e, tp = model.dtype_bytes, parallel.tp
    tokens, rows = batch.seq_length * batch.micro_batch_size, _rows(parallel, batch)
    wide = tokens * model.ffn // tp * e
    hidden = rows * model.hidden_size * e
    fc1 = wide * (2 if model.swiglu else 1)
    inner, saves_fc1 = _activation_inner(model, fc1, wide)
    found = [
        Storage(
            name="pre_mlp_layernorm.out",
            producer="pre_mlp_layernorm",
            size_bytes=hidden,
            saved_by=("linear_fc1",),
        ),
        *_norm_stats("pre_mlp_layernorm", model, parallel, batch),
        Storage(
            name="linear_fc1.out",
            producer="linear_fc1",
            size_bytes=fc1,
            saved_by=("activation",) if saves_fc1 else (),
        ),
        Storage(
            name="activation.inner",
            producer="activation",
            size_bytes=inner,
            saved_by=("activation",),
        ),
        Storage(
            name="activation.out",
            producer="activation",
            size_bytes=wide,
            saved_by=("linear_fc2",),
        ),
        Storage(name="linear_fc2.out", producer="linear_fc2", size_bytes=hidden),
        Storage(
            name="mlp_dropout.mask",
            producer="mlp_dropout",
            size_bytes=rows * model.hidden_size * model.mask_bytes,
            saved_by=("mlp_bda",),
        ),
    ]
    return tuple(s for s in found if s.size_bytes)


def _activation_inner(model: Model, fc1: int, wide: int) -> tuple[int, bool]:
    """Bytes that the activation saves of its own, and whether it saves the output of fc1.

    Fused kernels save their input. Unfused GELU saves input + bias (a new tensor if there is a
    bias); unfused SwiGLU also saves both factors of its product.
    """
    if model.fused_activation:
        return 0, True
    biased = fc1 if model.add_bias_linear else 0
    factors = 2 * wide if model.swiglu else 0
    return biased + factors, not model.add_bias_linear
