"""Attention in one kernel, as cuDNN has it: output, one log-sum a row in fp32, and the random state.

Sequences of equal length (sbhd, bshd), padded ones, and ones packed in a row of tokens (thd); causal
masks, sliding windows, grouped queries, dropout, and softmax with an offset in its sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.te_reference import Settings
from tests.support.te_reference.facts import refuse

KERNELS = ("fused_attn_fwd", "fused_attn_bwd")

_FORWARD = (
    *("max_seqlen_q", "max_seqlen_kv", "is_training", "attn_scale", "p_dropout", "set_zero", "qkv_layout"),
    *("o_format", "qkv_scale_inv_format", "bias_type", "attn_mask_type", "softmax_type", "window_size"),
    *("bottom_right_diagonal", "cu_seqlens_q", "cu_seqlens_kv", "q", "k", "v", "fake_dtype"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "page_table_k", "page_table_v", "s_quantizer"),
    *("o_quantizer", "bias", "softmax_offset", "rng_gen", "rng_elts_per_thread", "return_max_logit"),
    "cuda_graph",
)
_BACKWARD = (
    *("max_seqlen_q", "max_seqlen_kv", "attn_scale", "p_dropout", "set_zero", "qkv_layout", "o_format"),
    *("do_format", "dqkv_layout", "qkv_scale_inv_format", "do_scale_inv_format", "bias_type"),
    *("attn_mask_type", "softmax_type", "window_size", "bottom_right_diagonal", "deterministic"),
    *("cu_seqlens_q", "cu_seqlens_kv", "q", "k", "v", "o", "do", "fake_dtype", "aux_ctx_tensors"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "s_quantizer", "dp_quantizer", "dqkv_quantizer"),
    "cuda_graph",
)
Bounds = tuple[list[tuple[int, int]], list[tuple[int, int]]]

_SINCE_2_16 = {"o_format", "do_format", "dqkv_layout", "qkv_scale_inv_format", "do_scale_inv_format"}


def fused_attn_fwd(*args: Any) -> list[torch.Tensor]:
    """Output in the queries' format; log-sums, [b, h, s, 1] or [t, h, 1]; random state, 16 bytes."""
    a = _named(_FORWARD, args)
    for name in ("s_quantizer", "o_quantizer", "bias", "page_table_k", "return_max_logit", "rng_gen"):
        refuse(**{name: a[name]})
    q, k, v = a["q"], a["k"], a["v"]
    if q.dtype == torch.float32:
        raise NotImplementedError("fused attention is for bf16 and fp16")
    form = _form(a["qkv_layout"].name)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    stats = _stats_like(q, form)
    state = random_state(a["p_dropout"] > 0 or Settings.attention_moves_generator)
    offset = _offset(a, q)
    parts = blocks((out, q), (k, v), _as_rows(stats), form, _bounds(a, form))
    for index, ((o_, q_), (k_, v_), s_) in enumerate(parts):
        hidden = _hidden(a, q_.shape[2], k_.shape[2])
        kept = dropout_factors((*q_.shape[:3], k_.shape[2]), a["p_dropout"], state, index)
        result, sums = attend(q_, k_, v_, a["attn_scale"], hidden, kept, offset)
        o_.copy_(result)
        s_.copy_(sums)
    return [out, stats, state, *([a["softmax_offset"]] if offset is not None else [])]


def fused_attn_bwd(*args: Any) -> list[torch.Tensor | None]:
    """Gradients of queries, keys and values, none of a bias, and that of the softmax offset."""
    a = _named(_BACKWARD, args)
    for name in ("s_quantizer", "dp_quantizer", "dqkv_quantizer"):
        refuse(**{name: a[name]})
    q, k, v, o, gradient = a["q"], a["k"], a["v"], a["o"], a["do"]
    stats, state, *rest = a["aux_ctx_tensors"]
    form = _form(a["qkv_layout"].name)
    offset = _offset({**a, "softmax_offset": rest[0] if rest else None}, q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    d_offset = None if offset is None else torch.zeros_like(offset)
    parts = blocks((dq, q, o, gradient), (dk, dv, k, v), _as_rows(stats), form, _bounds(a, form))
    for index, ((dq_, q_, o_, g_), (dk_, dv_, k_, v_), s_) in enumerate(parts):
        hidden = _hidden(a, q_.shape[2], k_.shape[2])
        kept = dropout_factors((*q_.shape[:3], k_.shape[2]), a["p_dropout"], state, index)
        gradients = attend_backward(g_, q_, k_, v_, o_, s_, a["attn_scale"], hidden, kept)
        for target, value in zip((dq_, dk_, dv_), gradients, strict=True):
            target.copy_(value)
        if offset is not None and d_offset is not None:
            rows = (g_.float() * o_.float()).sum(-1, keepdim=True)
            d_offset -= (torch.exp(offset - s_) * rows).sum((0, 2), keepdim=True)
    return [dq, dk, dv, None, d_offset if rest else None]


# --- the arithmetic, shared with flash attention; all are [batch, heads, sequence, width] ---------------


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None,
    kept: torch.Tensor | None,
    offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (fp32) and log-sums ([b, h, s, 1], fp32); ``kept`` are the factors of dropout.

    A row that sees nothing gives 0. ``offset`` ([1, h, 1, 1]) is one more score in every sum.
    """
    scores = _scores(q, k, scale, hidden)
    sums = torch.logsumexp(scores, -1, keepdim=True)
    if offset is not None:
        sums = torch.logaddexp(sums, offset.expand_as(sums))
    shares = _shares(scores, sums)
    return (shares if kept is None else shares * kept) @ _to_heads(v, q.shape[1]), sums


def attend_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (fp32) of queries, keys and values from what the forward pass saved."""
    heads, groups = q.shape[1], k.shape[1]
    g, q_, k_, v_ = gradient.float(), q.float(), _to_heads(k, heads), _to_heads(v, heads)
    shares = _shares(_scores(q, k, scale, hidden), sums)
    d_shares = g @ v_.transpose(-1, -2)
    dv = (shares if kept is None else shares * kept).transpose(-1, -2) @ g
    if kept is not None:
        d_shares = d_shares * kept
    d_scores = shares * (d_shares - (g * out.float()).sum(-1, keepdim=True)) * scale
    dq, dk = d_scores @ k_, d_scores.transpose(-1, -2) @ q_
    if groups != heads:
        dk, dv = (x.unflatten(1, (groups, heads // groups)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def random_state(draws: bool) -> torch.Tensor:
    """Seed and offset, 16 bytes; drawn from the default generator, or nothing if nothing is to be drawn."""
    state = torch.zeros(2, dtype=torch.int64)
    if draws:
        state[0] = torch.randint(2**62, (1,))[0]
    return state


def dropout_factors(
    shape: tuple[int, ...], dropout: float, state: torch.Tensor, index: int
) -> torch.Tensor | None:
    """0 or 1/(1-p) for each share: the same for the same state, so that backward need not save them."""
    if dropout == 0:
        return None
    generator = torch.Generator().manual_seed((int(state[0]) + index) % 2**62)
    return torch.empty(shape).bernoulli_(1 - dropout, generator=generator) / (1 - dropout)


def hidden_pairs(queries: int, keys: int, left: int, right: int, bottom_right: bool) -> torch.Tensor | None:
    """Pairs outside a window of ``left`` keys before and ``right`` after (-1: all), [queries, keys].

    Query and key 0 stand beside each other, or the last of both with ``bottom_right``.
    """
    if left < 0 and right < 0:
        return None
    place = torch.arange(queries)[:, None] + (keys - queries if bottom_right else 0)
    distance = torch.arange(keys)[None, :] - place
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden


def blocks(
    queries: tuple[torch.Tensor, ...],
    keys: tuple[torch.Tensor, ...],
    sums: torch.Tensor,
    form: str,
    bounds: Bounds | None,
) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]]:
    """Views [batch, heads, sequence, width]: of all sequences at once, or of one after the other.

    ``queries`` and ``keys`` are tensors of the length of either, in the format ``form``; ``sums`` is
    [b, h, s, 1], or [1, h, t, 1] for packed sequences.
    """
    q_views, k_views = (tuple(_heads_first(t, form) for t in side) for side in (queries, keys))
    if bounds is None:
        yield q_views, k_views, sums
        return
    for i, ((q0, q1), (k0, k1)) in enumerate(zip(*bounds, strict=True)):
        row = slice(None) if form == "thd" else slice(i, i + 1)
        mine, others = tuple(t[row, :, q0:q1] for t in q_views), tuple(t[row, :, k0:k1] for t in k_views)
        yield mine, others, sums[row, :, q0:q1]


def _heads_first(x: torch.Tensor, form: str) -> torch.Tensor:
    if form == "thd":
        return x.permute(1, 0, 2)[None]
    return x.permute(1, 2, 0, 3) if form == "sbhd" else x.permute(0, 2, 1, 3)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, hidden: torch.Tensor | None) -> torch.Tensor:
    scores = (q.float() @ _to_heads(k, q.shape[1]).transpose(-1, -2)) * scale
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _shares(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    return torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0))


def _to_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)).float()


# --- arguments and layouts ---------------------------------------------------------------------------


def _named(names: tuple[str, ...], args: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments by name; 2.14 has no formats, and one type more, for the gradients."""
    if len(args) == len(names):
        return dict(zip(names, args, strict=True))
    older = [name for name in names if name not in _SINCE_2_16]
    if "do" in older:
        older.insert(older.index("fake_dtype") + 1, "dqkv_dtype")
    return dict(zip(older, args, strict=True))


def _form(layout: str) -> str:
    """sbhd, bshd or thd of a layout's name, such as NVTE_SBH3D or NVTE_THD_T2HD."""
    form = layout.split("_")[1].lower().replace("3", "").replace("2", "")
    if form not in ("sbhd", "bshd", "thd"):
        refuse(qkv_layout=layout)
    return form


def _stats_like(q: torch.Tensor, form: str) -> torch.Tensor:
    if form == "thd":
        return torch.zeros(q.shape[0], q.shape[1], 1)
    batch, sequence = (q.shape[1], q.shape[0]) if form == "sbhd" else q.shape[:2]
    return torch.zeros(batch, q.shape[2], sequence, 1)


def _as_rows(stats: torch.Tensor) -> torch.Tensor:
    """Log-sums as [batch, heads, sequence, 1]."""
    return stats.permute(1, 0, 2)[None] if stats.dim() == 3 else stats


def _offset(a: dict[str, Any], q: torch.Tensor) -> torch.Tensor | None:
    kind = a["softmax_type"].name
    if kind == "NVTE_VANILLA_SOFTMAX":
        return None
    if a["softmax_offset"] is None:
        return torch.zeros(1, q.shape[-2], 1, 1)
    return a["softmax_offset"].float().reshape(1, -1, 1, 1)


def _hidden(a: dict[str, Any], queries: int, keys: int) -> torch.Tensor | None:
    left, right = a["window_size"]
    if "CAUSAL" in a["attn_mask_type"].name:
        right = 0
    return hidden_pairs(queries, keys, int(left), int(right), bool(a["bottom_right_diagonal"]))


def _bounds(a: dict[str, Any], form: str) -> Bounds | None:
    """First and last token of every sequence, of the queries and of the keys; None where all are whole."""
    if form != "thd" and "PADDING" not in a["attn_mask_type"].name:
        return None
    both = []
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        lengths = a[name].diff().tolist()
        padded = a[name + "_padded"]
        starts = (a[name] if padded is None else padded).tolist() if form == "thd" else [0] * len(lengths)
        both.append([(start, start + length) for start, length in zip(starts, lengths, strict=False)])
    return both[0], both[1]
