"""The graph of one GPT layer of Megatron's local spec, from its shape alone.

Symbols as in arXiv 2205.05198: s sequence, b microbatch, h hidden, a heads, g query groups, d head
width, f MLP width, t tensor-parallel size. With sequence parallelism the layer's own tensors hold
s/t rows. A test traces real layers and compares region by region, for every supported option.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.layers import dense
from megatron_lynx.layers.kind import Glue, LayerKind, LayerWork, Mask, Operation, Submodule
from megatron_lynx.spec import Batch, Model, Parallel

NORMS = ("FusedLayerNorm", "WrappedTorchNorm", "LayerNorm", "RMSNorm")
"""Megatron's own with Apex, and torch's that its wrapper makes."""

PARTS = (
    Submodule("input_layernorm", "input_layernorm", NORMS),
    Submodule("linear_qkv", "self_attention.linear_qkv", ("ColumnParallelLinear",), gemm=True),
    Glue("qkv_split", "self_attention", after="linear_qkv", before="core_attention"),
    Submodule("core_attention", "self_attention.core_attention", ("DotProductAttention",)),
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
"""``qkv_split`` holds the rotary embedding too. The masks can be rebuilt from the random state alone."""

FORWARD_ORDER = (INPUT, *(part.name for part in PARTS))
"""Every region of a layer in forward order."""


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
        "core_attention": ("qkv_split.queries", "qkv_split.keys", "linear_qkv.out"),
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
    return LayerGraph(
        regions=regions, storages=tuple(s for s in storages if s.producer in names), cuts=dense.CUTS
    )


def _rows(parallel: Parallel, batch: Batch) -> int:
    """Rows (tokens) of the tensors that sequence parallelism splits."""
    rows = batch.seq_length * batch.micro_batch_size
    return rows // parallel.tp if parallel.sequence_parallel else rows


def _norm_storages(name: str, model: Model, rows: int) -> tuple[Storage, ...]:
    """What a norm saves of its own, beside its input.

    LayerNorm: mean and 1/deviation, in fp32 on CUDA and in the activation type on a CPU. RMSNorm:
    1/rms in fp32; a CPU has no fused kernel for it and saves the normalised rows too, in fp32, and
    instead of a 16-bit input its fp32 copy.
    """
    hidden = rows * model.hidden_size * 4
    if model.normalization == "LayerNorm":
        size = 2 * rows * (4 if model.device == "cuda" else model.dtype_bytes)
    elif model.device == "cuda":
        size = rows * 4
    else:
        size = rows * 4 + hidden * (1 if model.dtype_bytes == 4 else 2)
    return (Storage(name=f"{name}.stats", producer=name, size_bytes=size, saved_by=(name,)),)


def _norm_saves_input(model: Model) -> bool:
    return model.normalization == "LayerNorm" or model.device == "cuda" or model.dtype_bytes == 4


@dataclass(frozen=True, slots=True)
class _Heads:
    """How the fused QKV output reaches attention on one rank; sizes in bytes.

    Rotary embeddings copy queries and keys. Without them queries are views where the heads of a
    group lie side by side, and copies where several groups are merged (GQA); a single group is
    merged with the batch inside the attention. Unfused attention repeats keys and values (GQA).
    """

    fused: int
    attended: int
    rotated_queries: int
    rotated_keys: int
    rotation: int
    merged_queries: int
    inner_queries: int
    repeated: int

    @classmethod
    def of(cls, model: Model, parallel: Parallel, batch: Batch) -> _Heads:
        """The sizes for one microbatch."""
        heads, groups = model.num_attention_heads // parallel.tp, model.groups // parallel.tp
        head = batch.seq_length * batch.micro_batch_size * model.head_size * model.dtype_bytes
        rope, grouped = model.position_embedding_type == "rope", heads > groups
        unfused = model.attention == "unfused"
        single = grouped and groups == 1
        return cls(
            fused=(heads + 2 * groups) * head,
            attended=heads * head,
            rotated_queries=heads * head if rope else 0,
            rotated_keys=groups * head if rope else 0,
            rotation=4 * batch.seq_length * model.head_size * model.dtype_bytes if rope else 0,
            merged_queries=heads * head if grouped and not single and not rope else 0,
            inner_queries=heads * head
            if single and not rope and unfused and batch.micro_batch_size > 1
            else 0,
            repeated=2 * heads * head if grouped and unfused else 0,
        )

    @property
    def keeps_fused(self) -> bool:
        """Whether attention saves a view of the fused output: its values, or also its queries."""
        queries_viewed = not (self.rotated_queries or self.merged_queries or self.inner_queries)
        return not self.repeated or queries_viewed


def _attention_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    e, rows = model.dtype_bytes, _rows(parallel, batch)
    hidden = rows * model.hidden_size * e
    heads = _Heads.of(model, parallel, batch)

    def made(name: str, size_bytes: int, *saved_by: str) -> Storage:
        return Storage(name=name, producer=name.split(".")[0], size_bytes=size_bytes, saved_by=saved_by)

    found = [
        made("input", hidden, *(["input_layernorm"] if _norm_saves_input(model) else [])),
        made("input_layernorm.out", hidden, "linear_qkv"),
        *_norm_storages("input_layernorm", model, rows),
        made("linear_qkv.out", heads.fused, *(["core_attention"] if heads.keeps_fused else [])),
        made("qkv_split.rotation", heads.rotation, "qkv_split"),
        made("qkv_split.queries", heads.rotated_queries + heads.merged_queries, "core_attention"),
        made("qkv_split.keys", heads.rotated_keys, *([] if heads.repeated else ["core_attention"])),
        made("core_attention.queries", heads.inner_queries, "core_attention"),
        made("core_attention.repeated", heads.repeated, "core_attention"),
        *_score_storages(model, parallel, batch),
        made("core_attention.out", heads.attended, "linear_proj"),
        made("linear_proj.out", hidden),
        made("self_attn_dropout.mask", rows * model.hidden_size * model.mask_bytes, "self_attn_bda"),
        made("self_attn_bda.out", hidden, *(["pre_mlp_layernorm"] if _norm_saves_input(model) else [])),
    ]
    return tuple(s for s in found if s.size_bytes)


def _score_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    """The s x s tensors of unfused attention, or the flash kernel's log-sums."""
    e, heads = model.dtype_bytes, model.num_attention_heads // parallel.tp
    s, b = batch.seq_length, batch.micro_batch_size
    scores = b * heads * s * s
    sizes: dict[str, int] = {}
    if model.attention != "unfused":
        sizes["logsumexp"] = b * heads * s * 4
    else:
        wide = model.softmax_bytes(parallel.tp, batch)
        masked = model.mask_from_data or model.fuses_softmax(parallel.tp, batch)
        sizes = {"causal_mask": 0 if masked else s * s, "softmax": scores * wide}
        if model.attention_dropout > 0:
            sizes |= {"dropout_mask": scores * model.mask_bytes, "dropped": scores * e}
        elif wide != e:
            sizes["probabilities"] = scores * e
    return tuple(
        Storage(
            name=f"core_attention.{name}",
            producer="core_attention",
            size_bytes=size,
            saved_by=("core_attention",),
        )
        for name, size in sizes.items()
        if size
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
        *_norm_storages("pre_mlp_layernorm", model, rows),
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


def _work(model: Model, parallel: Parallel, batch: Batch) -> LayerWork:
    return dense.work(model, parallel, batch, layer_graph(model, parallel, batch))


forward_slots, backward_slots = dense.forward_slots, dense.backward_slots

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
)
