"""The layer of Transformer Engine's spec: norms inside the linears after them, and its attention.

Symbols as in ``dense``. What its modules save was traced by running its own Python over stand-ins for its
kernels; a test traces again, for every option and several versions of it. **No GPU has run it.**
"""

from __future__ import annotations

from megatron_lynx.graph import LayerGraph, Storage
from megatron_lynx.layers import dense
from megatron_lynx.layers.kernels import attention_kernel, fuses_softmax
from megatron_lynx.layers.kind import Glue, Inner, LayerKind, LayerWork, Mask, Operation, Submodule
from megatron_lynx.layers.storages import (
    Heads,
    attention_reader,
    gate_storages,
    made,
    mlp_storages,
    residual_storages,
    rows_of,
    scores_bytes,
    split_storages,
)
from megatron_lynx.spec import Batch, Model, Parallel

NORM = "transformer_engine.pytorch.module.layernorm_linear.apply_normalization"
COLUMN, ROW = ("TELayerNormColumnParallelLinear",), ("TERowParallelLinear",)

PARTS = (
    Inner("input_layernorm", inside="linear_qkv", function=NORM),
    Submodule("linear_qkv", "self_attention.linear_qkv", COLUMN, gemm=True),
    Glue("qkv_split", "self_attention", after="linear_qkv", before="core_attention"),
    Submodule("core_attention", "self_attention.core_attention", ("TEDotProductAttention",)),
    Glue("output_gate", "self_attention", "core_attention", "linear_proj", "attention_output_gate"),
    Submodule("linear_proj", "self_attention.linear_proj", ROW, gemm=True),
    Mask("self_attn_dropout", inside="self_attn_bda"),
    Operation("self_attn_bda", "self_attn_bda"),
    Inner("pre_mlp_layernorm", inside="linear_fc1", function=NORM),
    Submodule("linear_fc1", "mlp.linear_fc1", COLUMN, gemm=True),
    Glue("activation", "mlp", after="linear_fc1", before="linear_fc2"),
    Submodule("linear_fc2", "mlp.linear_fc2", ROW, gemm=True),
    Mask("mlp_dropout", inside="mlp_bda"),
    Operation("mlp_bda", "mlp_bda"),
)
"""As in ``local``, but for the norms: a linear saves what its norm reads and makes, all at once."""

_READS = {
    "linear_qkv": ("input", "input_layernorm.out", "input_layernorm.stats"),
    "linear_fc1": ("self_attn_bda.out", "pre_mlp_layernorm.out", "pre_mlp_layernorm.stats"),
}

OFFLOAD_MODULES = {
    "qkv_linear": ("linear_qkv", "qkv_split"),
    "core_attn": ("core_attention",),
    "attn_proj": ("linear_proj",),
}
"""Norms of queries and keys run within the first."""


def layer_graph(model: Model, parallel: Parallel, batch: Batch) -> LayerGraph:
    """Regions and storages of one layer on one tensor-parallel rank, for one microbatch.

    A kernel of cuDNN moves the generator on whether it drops or not.
    """
    rows = rows_of(parallel, batch)
    hidden = rows * model.hidden_size * model.dtype_bytes
    storages = (
        made("input", hidden, "linear_qkv"),
        made("input_layernorm.out", hidden, "linear_qkv"),
        made("input_layernorm.stats", _stats_bytes(model, rows), "linear_qkv"),
        *_attention_storages(model, parallel, batch),
        *residual_storages(model, rows, attention_saved_by=["linear_fc1"]),
        made("pre_mlp_layernorm.out", hidden, "linear_fc1"),
        made("pre_mlp_layernorm.stats", _stats_bytes(model, rows), "linear_fc1"),
        *mlp_storages(model, parallel, batch),
    )
    draws = model.attention_dropout > 0 or attention_kernel(model) == "fused"
    return dense.assemble(model, parallel, PARTS, storages, _READS, attention_draws=draws)


def _stats_bytes(model: Model, rows: int) -> int:
    """Mean and 1/deviation of each row in fp32, or 1/rms alone."""
    return rows * 4 * (2 if model.normalization == "LayerNorm" else 1)


def _attention_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    """From the fused QKV output to the input of the projection.

    Views of the fused output go into a kernel as they are if they are all that it holds, head by head.
    Else Transformer Engine copies each of the three that is not a tensor of its own. What is kept where keys
    and values are passed on between context-parallel ranks was read in its source, not traced.
    """
    heads, kernel = Heads.of(model, parallel, batch), attention_kernel(model)
    viewed = not (heads.new or heads.grouped or model.attention_output_gate or parallel.cp > 1)
    own_queries = heads.queries if heads.new or heads.merged else 0
    own_keys = heads.keys if heads.new else 0
    copied = {
        "queries": 0 if own_queries or viewed else heads.queries,
        "keys": 0 if own_keys or viewed else heads.keys,
        "values": 0 if viewed else heads.keys,
    }
    savers = ["core_attention"]
    if kernel == "flash" and (batch.micro_batch_size > 1 or viewed):
        # The package wants the batch before the sequence, which copies what more than one sequence has.
        copied, savers = {"queries": heads.queries, "keys": heads.keys, "values": heads.keys}, []
    repeated = kernel == "unfused" and heads.grouped
    if repeated:
        copied |= {"keys": heads.queries, "values": heads.queries}
    if parallel.cp > 1 and parallel.cp_comm_type == "p2p":  # keys and values travel in one tensor
        copied |= {"keys": heads.keys, "values": heads.keys}
        repeated = True
    elif parallel.cp > 1 and "a2a" in parallel.cp_comm_type:  # all heads for a part of the tokens come back
        copied, savers = {"queries": heads.queries, "keys": heads.keys, "values": heads.keys}, []
    return (
        made("linear_qkv.out", heads.fused, *(savers if viewed else [])),
        *split_storages(model, parallel, batch),
        *_qk_norm_storages(model, heads),
        made("qkv_split.queries", own_queries, *savers),
        made("qkv_split.keys", own_keys, *([] if repeated else savers)),
        *(made(f"core_attention.{name}", size, "core_attention") for name, size in copied.items()),
        *_kernel_storages(model, parallel, batch),
        *_output_storages(model, parallel, batch, heads),
        *gate_storages(model, heads),
    )


def _qk_norm_storages(model: Model, heads: Heads) -> tuple[Storage, ...]:
    """The norms of queries and keys: what goes in, made contiguous, and statistics of each head."""
    if not model.qk_layernorm:
        return ()
    normed = heads.queries + heads.keys
    rows = normed // (model.head_size * model.dtype_bytes)
    return (
        made("qkv_split.normed", normed, "qkv_split"),
        made("qkv_split.stats", _stats_bytes(model, rows), "qkv_split"),
    )


def _output_storages(model: Model, parallel: Parallel, batch: Batch, heads: Heads) -> tuple[Storage, ...]:
    """The output of attention, which the flash and fused kernels save too. Flash has the batch first: with
    more than one sequence what goes on is a copy of what it saved; so it is where heads are exchanged."""
    reader, kernel = attention_reader(model), attention_kernel(model)
    exchanged = parallel.cp > 1 and "a2a" in parallel.cp_comm_type
    if exchanged or (kernel == "flash" and batch.micro_batch_size > 1):
        return (
            made("core_attention.by_batch", heads.queries, "core_attention"),
            made("core_attention.out", heads.queries, reader),
        )
    also = ["core_attention"] if kernel != "unfused" else []
    return (made("core_attention.out", heads.queries, *also, reader),)


def _kernel_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    """What the kernels save besides: log-sums and a random state; cuDNN's the ends of the sequences and an
    offset of the softmax too; unfused attention its s x s tensors."""
    kernel, scores = attention_kernel(model), scores_bytes(model, parallel, batch)
    if kernel == "unfused":
        sizes = _score_bytes(model, parallel, batch, scores)
    else:
        sizes = {
            "logsumexp": scores // batch.seq_length * 4,
            "random_state": 16 * _runs(parallel, 2, parallel.cp),
        }
    if kernel == "fused":
        sizes["sequence_ends"] = 4 * (batch.micro_batch_size + 1) * _runs(parallel, 3, 2 * parallel.cp)
        offset = model.num_attention_heads // parallel.tp * 4
        sizes["offset"] = 0 if model.softmax_type == "vanilla" else offset
    return tuple(made(f"core_attention.{name}", size, "core_attention") for name, size in sizes.items())


def _runs(parallel: Parallel, gathered: int, passed_on: int) -> int:
    """How often attention that is split over context-parallel ranks has something: ``gathered`` where keys
    and values are, ``passed_on`` where they go from rank to rank; once where heads are exchanged."""
    if parallel.cp == 1:
        return 1
    return {"p2p": passed_on, "all_gather": gathered}.get(parallel.cp_comm_type, 1)


def _score_bytes(model: Model, parallel: Parallel, batch: Batch, scores: int) -> dict[str, int]:
    """The softmax in one kernel keeps its result and its scale; without that kernel the mask is kept, the
    result in fp32 and, in 16 bits, what goes on. An offset is one more column."""
    e, s, dropout = model.dtype_bytes, batch.seq_length, model.attention_dropout > 0
    sizes = {
        "dropout_mask": scores * model.mask_bytes if dropout else 0,
        "dropped": scores * e if dropout else 0,
    }
    if fuses_softmax(model, parallel.tp, batch):
        return {"softmax": scores * e, "scale": 4, **sizes}
    columns = s if model.softmax_type == "vanilla" else s + 1
    whole = scores // s * columns
    return {
        "causal_mask": s * columns,
        "softmax": whole * 4,
        "probabilities": whole * e if e < 4 and not dropout else 0,
        **sizes,
    }


def _work(model: Model, parallel: Parallel, batch: Batch) -> LayerWork:
    return dense.work(model, parallel, batch, layer_graph(model, parallel, batch))


KIND = LayerKind(
    name="transformer_engine",
    layer_class="TransformerLayer",
    parts=PARTS,
    cuts=dense.CUTS,
    graph=layer_graph,
    forward_slots=dense.forward_slots,
    backward_slots=dense.backward_slots,
    beside=dense.BESIDE,
    work=_work,
    workspace_bytes=dense.workspace_bytes,
    parameters=dense.parameters,
    recompute_modules={m: dense.RECOMPUTE_MODULES[m] for m in ("core_attn", "mlp")},  # its norms are fused
    offload_modules=OFFLOAD_MODULES,
    parents=dense.PARENTS,
    within=dense.WITHIN,
)
