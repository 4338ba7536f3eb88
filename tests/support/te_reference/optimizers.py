"""What runs over lists of tensors at once: Adam, norms, scaling."""

from __future__ import annotations

import torch

KERNELS = ("multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_scale_tensor")

Lists = list[list[torch.Tensor]]


def multi_tensor_l2norm(
    chunk_size: int, noop: torch.Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all tensors together ([1], fp32), and that of each if it is asked for."""
    norms = torch.stack([t.float().norm() for t in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().reshape(1), norms if per_tensor else torch.zeros(0)


def multi_tensor_scale(chunk_size: int, noop: torch.Tensor, lists: Lists, scale: float) -> None:
    """Second list = first list times ``scale``."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(chunk_size: int, noop: torch.Tensor, lists: Lists, scale: torch.Tensor) -> None:
    """The same with a factor that is a tensor."""
    multi_tensor_scale(chunk_size, noop, lists, float(scale))


def multi_tensor_adam(
    chunk_size: int,
    noop: torch.Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Adam (mode 0) or AdamW (mode 1) in place, in fp32.

    The lists are gradients, weights, first and second moments, and, for weights of half precision,
    their fp32 masters.
    """
    first = 1 - beta1**step if bias_correction else 1.0
    second = 1 - beta2**step if bias_correction else 1.0
    for gradient, parameter, mean, square, *master in zip(*lists, strict=True):
        weight, g = (master[0] if master else parameter).float(), gradient.float()
        if mode == 0:
            g = g + decay * weight
        m = mean.float().mul(beta1).add(g, alpha=1 - beta1)
        s = square.float().mul(beta2).addcmul(g, g, value=1 - beta2)
        update = (m / first) / ((s / second).sqrt() + eps)
        if mode == 1:
            update = update + decay * weight
        weight = weight - lr * update
        for target, value in ((mean, m), (square, s), (parameter, weight), *((t, weight) for t in master)):
            target.copy_(value)
