"""What dense layers save alike, whatever computes their norms and linears, storage by storage.

Sizes were traced for every option; a test traces real layers again and compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_lynx.graph import Storage
from megatron_lynx.layers.kernels import rotation_bytes
from megatron_lynx.spec import Batch, Model, Parallel


def made(name: str, size_bytes: int, *saved_by: str) -> Storage:
    """The storage ``region.what``."""
    return Storage(name=name, producer=name.split(".")[0], size_bytes=size_bytes, saved_by=saved_by)


def existing(storages: Iterable[Storage]) -> tuple[Storage, ...]:
    """Those that hold something."""
    return tuple(storage for storage in storages if storage.size_bytes)


def rows_of(parallel: Parallel, batch: Batch) -> int:
    """Rows (tokens) of the tensors that sequence parallelism splits."""
    rows = parallel.tokens(batch)
    return rows // parallel.tp if parallel.sequence_parallel else rows


def norm_stats_bytes(model: Model, rows: int, width: int) -> int:
    """What torch's norm over ``width`` elements saves of its own, beside its input.

    LayerNorm: mean and 1/deviation, in fp32 on CUDA and in the activation type on a CPU. RMSNorm:
    1/rms in fp32; a CPU has no fused kernel for it and saves the normalised rows too, in fp32, and
    instead of a 16-bit input its fp32 copy.
    """
    if model.normalization == "LayerNorm":
        return 2 * rows * (4 if model.device == "cuda" else model.dtype_bytes)
    if model.device == "cuda":
        return rows * 4
    return rows * 4 + rows * width * 4 * (1 if model.dtype_bytes == 4 else 2)


def norm_saves_input(model: Model) -> bool:
    """Whether torch's norm saves its input as it is."""
    return model.normalization == "LayerNorm" or model.device == "cuda" or model.dtype_bytes == 4


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys and values of one rank on their way from the fused QKV output to attention, in bytes.

    ``fused`` is that output (with an output gate it holds the gate too), ``queries`` and ``keys`` what
    all heads and all groups take. ``new`` says that rotary embedding or a norm has made new queries and
    keys; else keys are views of the fused output, and so are queries, but where several groups are
    merged (``merged``): that copies them. Values are views always.
    """

    fused: int
    queries: int
    keys: int
    grouped: bool
    merged: bool
    new: bool

    @classmethod
    def of(cls, model: Model, parallel: Parallel, batch: Batch) -> Heads:
        """Those of one microbatch."""
        heads, groups = model.num_attention_heads // parallel.tp, model.groups // parallel.tp
        head = parallel.tokens(batch) * model.head_size * model.dtype_bytes
        grouped = heads > groups
        return cls(
            fused=(heads * (2 if model.attention_output_gate else 1) + 2 * groups) * head,
            queries=heads * head,
            keys=groups * head,
            grouped=grouped,
            merged=grouped and groups > 1,
            new=model.rotary or model.qk_layernorm,
        )


def split_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    """What the split makes besides queries and keys."""
    return (made("qkv_split.rotation", rotation_bytes(model, parallel, batch), "qkv_split"),)


def gate_storages(model: Model, heads: Heads) -> tuple[Storage, ...]:
    """The output gate: a sigmoid in fp32, and what goes on to the projection."""
    if not model.attention_output_gate:
        return ()
    return (
        made("output_gate.sigmoid", heads.queries // model.dtype_bytes * 4, "output_gate"),
        made("output_gate.out", heads.queries, "linear_proj"),
    )


def attention_reader(model: Model) -> str:
    """What saves the output of attention."""
    return "output_gate" if model.attention_output_gate else "linear_proj"


def residual_storages(model: Model, rows: int, *, attention_saved_by: Iterable[str]) -> tuple[Storage, ...]:
    """The outputs of the two halves, and the masks of their dropout."""
    hidden, mask = rows * model.hidden_size * model.dtype_bytes, rows * model.hidden_size * model.mask_bytes
    mask = mask if model.hidden_dropout else 0
    return (
        made("linear_proj.out", hidden),
        made("self_attn_dropout.mask", mask, "self_attn_bda"),
        made("self_attn_bda.out", hidden, *attention_saved_by),
        made("linear_fc2.out", hidden),
        made("mlp_dropout.mask", mask, "mlp_bda"),
    )


def mlp_storages(model: Model, parallel: Parallel, batch: Batch) -> tuple[Storage, ...]:
    """From the output of fc1 to the input of fc2."""
    wide = parallel.tokens(batch) * model.ffn // parallel.tp * model.dtype_bytes
    fc1 = wide * (2 if model.gated else 1)
    inner, saves_fc1 = _activation_inner(model, fc1, wide)
    return (
        made("linear_fc1.out", fc1, *(["activation"] if saves_fc1 else [])),
        made("activation.inner", inner, "activation"),
        made("activation.out", wide, "linear_fc2"),
    )


def _activation_inner(model: Model, fc1: int, wide: int) -> tuple[int, bool]:
    """Bytes that the activation saves of its own, and whether it saves the output of fc1.

    Fused kernels save their input. Else the input of the activation is saved, which a bias makes a new
    tensor; a squared ReLU saves the ReLU's output instead. A gate saves both factors of its product too,
    quick GELU its sigmoid, a clamp the clamped half that goes into the activation.
    """
    if model.fused_activation and not (model.squared_relu or model.quick_geglu):
        return 0, True
    biased = model.add_bias_linear
    if model.use_te_activation_func:
        return fc1 if biased else 0, not biased
    if model.squared_relu:
        return wide, False
    more = wide * (2 if model.gated else 0)
    more += wide if model.quick_geglu else 0
    more += wide if model.gated and model.activation_func_clamp_value is not None else 0
    return more + (fc1 if biased else 0), not biased


def scores_bytes(model: Model, parallel: Parallel, batch: Batch) -> int:
    """Elements of one s x s tensor of all heads, of which a context-parallel rank has its rows."""
    return parallel.tokens(batch) * model.num_attention_heads // parallel.tp * batch.seq_length
