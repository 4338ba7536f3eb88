"""A stand-in for the package flash-attn: what TE's FlashAttention calls, and what that saves.

It draws from the generator only where something is dropped. Saved: q, k, v, the output, log-sums
([b, h, s], or [h, t] for packed sequences; fp32) and the random state.
"""

from __future__ import annotations

import sys
import types
from itertools import pairwise
from typing import Any

import torch

from tests.support.te_reference import CALLS
from tests.support.te_reference.attention import (
    attend,
    attend_backward,
    blocks,
    dropout_factors,
    hidden_pairs,
    random_state,
)
from tests.support.te_reference.facts import refuse


def modules() -> dict[str, types.ModuleType]:
    """What goes into ``sys.modules``: the package and the modules that TE imports from it."""
    from tests.support.te_reference.loading import FLASH_VERSION, _Stand

    package, interface, compiled = (
        _Stand(name) for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_2_cuda")
    )
    package.__path__ = []
    package.__version__ = FLASH_VERSION  # type: ignore[attr-defined]
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        setattr(interface, name, getattr(sys.modules[__name__], name))
        setattr(package, name, getattr(interface, name))
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    return {module.__name__: module for module in (package, interface, compiled)}


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Attention of [batch, sequence, heads, width] tensors."""
    refuse(softcap=softcap or None, alibi_slopes=alibi_slopes)
    window = (window_size[0], 0) if causal else window_size
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    result: torch.Tensor = _Flash.apply(q, k, v, None, None, dropout_p, scale, window)
    return result


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of sequences packed in a row, [tokens, heads, width]."""
    refuse(softcap=softcap or None, alibi_slopes=alibi_slopes, block_table=block_table)
    window = (window_size[0], 0) if causal else window_size
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    result: torch.Tensor = _Flash.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, scale, window)
    return result


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts_q: torch.Tensor | None,
        starts_k: torch.Tensor | None,
        dropout: float,
        scale: float,
        window: tuple[int, int],
    ) -> torch.Tensor:
        CALLS["flash_attn_fwd"] += 1
        if q.dtype == torch.float32:
            raise NotImplementedError("flash attention is for bf16 and fp16")
        out = torch.empty(q.shape, dtype=q.dtype)
        packed = starts_q is not None
        sums = torch.empty((q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]))
        state = random_state(dropout > 0)
        starts = [starts_q, starts_k] if packed else []
        for index, ((o_, q_), (k_, v_), s_) in enumerate(_parts((out, q), (k, v), sums, starts)):
            hidden = hidden_pairs(q_.shape[2], k_.shape[2], window[0], window[1], True)
            kept = dropout_factors((*q_.shape[:3], k_.shape[2]), dropout, state, index)
            result, row_sums = attend(q_, k_, v_, scale, hidden, kept)
            o_.copy_(result)
            s_.copy_(row_sums)
        ctx.save_for_backward(q, k, v, out, sums, *starts, state)
        ctx.constants = (dropout, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        CALLS["flash_attn_bwd"] += 1
        q, k, v, out, sums, *starts, state = ctx.saved_tensors
        dropout, scale, window = ctx.constants
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        parts = _parts((dq, gradient, q, out), (dk, dv, k, v), sums, starts)
        for index, ((dq_, g_, q_, o_), (dk_, dv_, k_, v_), s_) in enumerate(parts):
            hidden = hidden_pairs(q_.shape[2], k_.shape[2], window[0], window[1], True)
            kept = dropout_factors((*q_.shape[:3], k_.shape[2]), dropout, state, index)
            gradients = attend_backward(g_, q_, k_, v_, o_, s_, scale, hidden, kept)
            for target, value in zip((dq_, dk_, dv_), gradients, strict=True):
                target.copy_(value)
        return dq, dk, dv, None, None, None, None, None


def _parts(
    queries: tuple[torch.Tensor, ...], keys: tuple[torch.Tensor, ...], sums: torch.Tensor, starts: list[Any]
) -> Any:
    if not starts:
        return blocks(queries, keys, sums[..., None], "bshd", None)
    q, k = (list(pairwise(s.tolist())) for s in starts)
    return blocks(queries, keys, sums[None, ..., None], "thd", (q, k))
