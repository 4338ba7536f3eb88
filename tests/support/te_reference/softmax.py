"""Scaled and masked softmax over the last dimension: computed in fp32, given back in the input's type."""

from __future__ import annotations

import torch

KERNELS = tuple(
    f"{kind}_softmax_{way}"
    for kind in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")
    for way in ("forward", "backward")
)

_MASKED = -10000.0


def scaled_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """Of ``scores * scale``."""
    return torch.softmax(scores.float() * float(scale), -1).to(scores.dtype)


def scaled_masked_softmax_forward(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Where ``mask`` is not zero, a score counts as -10000."""
    masked = (scores.float() * float(scale)).masked_fill(mask.bool(), _MASKED)
    return torch.softmax(masked, -1).to(scores.dtype)


def scaled_aligned_causal_masked_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """A query sees the keys up to its own place, counted from the last of both."""
    queries, keys = scores.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    masked = (scores.float() * float(scale)).masked_fill(later, float("-inf"))
    return torch.softmax(masked, -1).to(scores.dtype)


scaled_upper_triang_masked_softmax_forward = scaled_aligned_causal_masked_softmax_forward


def scaled_softmax_backward(gradient: torch.Tensor, results: torch.Tensor, scale: float) -> torch.Tensor:
    """Gradient of the scores; a masked score has probability 0, and so gradient 0."""
    g, p = gradient.float(), results.float()
    return (float(scale) * p * (g - (g * p).sum(-1, keepdim=True))).to(gradient.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward
