"""Which kernels a layer runs, where Megatron or Transformer Engine chooses by shape or type."""

from __future__ import annotations

from typing import Literal

from megatron_lynx.spec import Batch, Model, Parallel

TE = "transformer_engine"


def attention_kernel(model: Model) -> Literal["flash", "fused", "unfused"]:
    """What computes attention: Transformer Engine has no kernel for fp32, nor flash-attn one for a
    softmax with an offset."""
    if model.transformer_impl != TE:
        return model.attention
    if model.dtype_bytes == 4 or (model.attention == "flash" and model.softmax_type != "vanilla"):
        return "unfused"
    return model.attention


def fuses_softmax(model: Model, tp: int, batch: Batch) -> bool:
    """Whether unfused attention takes the fused kernel for scale, mask and softmax, which works in 16
    bits and makes no mask (``FusedScaleMaskSoftmax.is_kernel_available``, Megatron's or Transformer
    Engine's)."""
    heads, s = model.num_attention_heads // tp * batch.micro_batch_size, batch.seq_length
    if model.dtype_bytes != 2 or model.softmax_type != "vanilla" or heads % 4:
        return False
    if model.transformer_impl == TE:
        return 16 < s < 16384 and s % 8 == 0
    return model.masked_softmax_fusion and model.device == "cuda" and 16 < s <= 4096 and s % 4 == 0


def softmax_bytes(model: Model, tp: int, batch: Batch) -> int:
    """Size of one element of unfused attention's softmax."""
    wide = model.attention_softmax_in_fp32 or model.transformer_impl == TE
    return 4 if wide and not fuses_softmax(model, tp, batch) else model.dtype_bytes


def rotation_bytes(model: Model, parallel: Parallel, batch: Batch) -> int:
    """Sines and cosines that the rotary embedding saves, for queries and for keys; a kernel of Transformer
    Engine's, which rotates in one go, saves none."""
    fused = model.apply_rope_fusion
    if fused is None:
        fused = model.transformer_impl == TE and model.position_embedding_type == "rope"
    if fused or not model.rotary:
        return 0
    return (
        4 * batch.seq_length // parallel.cp * int(model.head_size * model.rotary_percent) * model.dtype_bytes
    )
