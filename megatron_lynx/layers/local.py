"""The layer of Megatron's local spec: torch's norms and attention, Megatron's own linears.

Symbols as in arXiv 2205.05198: s sequence, b microbatch, h hidden, a heads, g query groups, d head
width, f MLP width, t tensor-parallel size. With sequence parallelism the layer's own tensors hold
s/t rows. A test traces real layers and compares region by region, for every supported option.
"""

from __future__ import annotations

from megatron_lynx.graph import INPUT, LayerGraph, Storage
from megatron_lynx.layers import dense
from megatron_lynx.layers.kernels import attention_kernel, fuses_softmax, softmax_bytes
from megatron_lynx.layers.kind import Glue, LayerKind, LayerWork, Mask, Operation, Submodule
from megatron_lynx.layers.storages import (
    Heads,
    attention_reader,
    gate_storages,
    made,
    mlp_storages,
    norm_saves_input,
    norm_stats_bytes,
    residual_storages,
    rows_of,
    scores_bytes,
    split_storages,
)
from megatron_lynx.spec import Batch, Model, Parallel

NORMS = ("FusedLayerNorm", "WrappedTorchNorm", "LayerNorm", "RMSNorm")
"""Megatron's own with Apex, and torch's that its wrapper makes."""

PARTS = (
    Submodule("input_layernorm", "input_layernorm", NORMS),
    Submodule("linear_qkv", "self_attention.linear_qkv", ("ColumnParallelLinear",), gemm=True),
    Glue("qkv_split", "self_attention", after="linear_qkv", before="core_attention"),
    Submodule("core_attention", "self_attention.core_attention", ("DotProductAttention",)),
    Glue("output_gate", "self_attention", "core_attention", "linear_proj", "attention_output_gate"),
    Submodule("linear_proj", "self_attention.linear_proj", ("RowParallelLinear",), gemm=True),
    Mask("self_attn_dropout", inside="self_attn_bda"),
    Operation("self_attn_bda", "self_attn_bda"),
    Submodule("pre_mlp_layernorm", "pre_mlp_layernorm", NORMS),
    Submodule("linear_fc1", "mlp.linear_fc1", ("ColumnParallelLinear",), gemm=True),
    Glue("activation", "mlp", after="linear_fc1", before="linear_fc2"),
    Submodule("linear_fc2", "mlp.linear_fc2", ("RowParallelLinear",), gemm=True),
    Mask("mlp_dropout", inside="mlp_bda"),
    Operation("mlp_bda", "mlp_bda"),
)
"""``qkv_split`` holds the rotary embedding and the norms of queries and keys too. ``output_gate`` is
there with ``--attention-output-gate`` alone. The masks can be rebuilt from the random state alone."""

_READS = {
    "linear_qkv": ("input_layernorm.out",),
    "linear_fc1": ("pre_mlp_layernorm.out",),
}


def layer_graph(model: Model, parallel: Parallel, batch: Batch) -> LayerGraph:
    """Regions and storages of one layer on one tensor-parallel rank, for one microbatch."""
    rows = rows_of(parallel, batch)
    hidden = rows * model.hidden_size * model.dtype_bytes
    stats = norm_stats_bytes(model, rows, model.hidden_size)
    saved = norm_saves_input(model)
    storages = (
        made("input", hidden, *(["input_layernorm"] if saved else [])),
        made("input_layernorm.out", hidden, "linear_qkv"),
        made("input_layernorm.stats", stats, "input_layernorm"),
        *_attention_storages(model, parallel, batch),
        *residual_storages(model, rows, attention_saved_by=["pre_mlp_layernorm"] if saved else []),
        made("pre_mlp_layernorm.out", hidden, "linear_fc1"),
        made("pre_mlp_layernorm.stats", stats, "pre_mlp_layernorm"),
        *mlp_storages(model, parallel, batch),
    )
    draws = model.attention_dropout > 0
    return dense.assemble(model, parallel, PARTS, storages, _READS, attention_draws=draws)


def _attention_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    """From the fused QKV output to the input of the projection.

    A single group is merged with the batch inside attention, which copies. Unfused attention repeats keys
    and values (GQA). It saves the fused output where its values, or its queries, are views of that.
    """
    heads, unfused = Heads.of(model, parallel, batch), attention_kernel(model) == "unfused"
    single = heads.grouped and not heads.merged and not heads.new
    inner = single and unfused and batch.micro_batch_size > 1
    repeated = heads.grouped and unfused
    viewed = not (heads.new or heads.merged or inner)
    split, savers = _qk_norm_storages(model, parallel, batch, heads)
    savers += ["core_attention"] if viewed or not repeated else []
    return (
        made("linear_qkv.out", heads.fused, *savers),
        *split_storages(model, parallel, batch),
        *split,
        made("qkv_split.queries", heads.queries if heads.new or heads.merged else 0, "core_attention"),
        made(
            "qkv_split.keys",
            heads.keys if heads.new else 0,
            *([] if repeated else ["core_attention"]),
        ),
        made("core_attention.queries", heads.queries if inner else 0, "core_attention"),
        made("core_attention.repeated", 2 * heads.queries if repeated else 0, "core_attention"),
        *_score_storages(model, parallel, batch),
        made("core_attention.out", heads.queries, attention_reader(model)),
        *gate_storages(model, heads),
    )


def _qk_norm_storages(
    model: Model, parallel: Parallel, batch: Batch, heads: Heads
) -> tuple[tuple[Storage, ...], list[str]]:
    """What the norms of queries and keys save, and who saves the fused QKV output for them."""
    if not model.qk_layernorm:
        return (), []
    rows = (heads.queries + heads.keys) // (model.head_size * model.dtype_bytes)
    saved = norm_saves_input(model)
    return (
        made("qkv_split.stats", norm_stats_bytes(model, rows, model.head_size), "qkv_split"),
        made("qkv_split.merged", heads.queries if heads.merged and saved else 0, "qkv_split"),
    ), ["qkv_split"] if saved else []


def _score_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    """The s x s tensors of unfused attention, or the flash kernel's log-sums.

    An offset of the softmax is one more column.
    """
    e, s = model.dtype_bytes, batch.seq_length
    scores = scores_bytes(model, parallel, batch)
    if attention_kernel(model) != "unfused":
        return (made("core_attention.logsumexp", scores // s * 4, "core_attention"),)
    wide = softmax_bytes(model, parallel.tp, batch)
    masked = model.mask_from_data or fuses_softmax(model, parallel.tp, batch)
    columns = s if model.softmax_type == "vanilla" else s + 1
    dropout = model.attention_dropout > 0
    sizes = {
        "causal_mask": 0 if masked else s * s,
        "softmax": scores // s * columns * wide,
        "dropout_mask": scores * model.mask_bytes if dropout else 0,
        "dropped": scores * e if dropout else 0,
        "probabilities": scores * e if wide != e and not dropout else 0,
    }
    return tuple(made(f"core_attention.{name}", size, "core_attention") for name, size in sizes.items())


def _work(model: Model, parallel: Parallel, batch: Batch) -> LayerWork:
    return dense.work(model, parallel, batch, layer_graph(model, parallel, batch))


forward_slots, backward_slots = dense.forward_slots, dense.backward_slots
FORWARD_ORDER = (INPUT, *(part.name for part in PARTS))
"""Every region of a layer in forward order."""

KIND = LayerKind(
    name="local",
    layer_class="TransformerLayer",
    parts=PARTS,
    cuts=dense.CUTS,
    graph=layer_graph,
    forward_slots=forward_slots,
    backward_slots=backward_slots,
    beside=dense.BESIDE,
    work=_work,
    workspace_bytes=dense.workspace_bytes,
    parameters=dense.parameters,
    recompute_modules=dense.RECOMPUTE_MODULES,
    parents=dense.PARENTS,
    within=dense.WITHIN,
)
