"""LayerNorm and RMSNorm: computed in fp32, one mean and one inverse deviation a row, in fp32."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.te_reference.facts import TORCH_TYPE, refuse

KERNELS = ("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd")


def layernorm_fwd(
    input: torch.Tensor,  # noqa: A002 (TE passes it by name)
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: torch.Tensor | None,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Normalised rows, means and inverse deviations."""
    refuse(quantizer=quantizer, ln_out=ln_out)
    shift = None if bias is None else bias.float()
    gain = _gain(weight, zero_centered_gamma)
    out, mean, inverse = torch.native_layer_norm(input.float(), (input.shape[-1],), gain, shift, eps)
    return [out.to(TORCH_TYPE[int(otype)]), mean.reshape(-1), inverse.reshape(-1)]


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Gradients of the input, the gain and the bias."""
    rows = (*x.shape[:-1], 1)
    gain = _gain(gamma, zero_centered_gamma)
    gradients = torch.ops.aten.native_layer_norm_backward(
        dz.reshape(x.shape).float(),
        x.float(),
        (x.shape[-1],),
        mu.view(rows),
        rsigma.view(rows),
        gain,
        torch.zeros_like(gain),
        [True] * 3,
    )
    return [gradients[0].to(x.dtype), gradients[1].to(gamma.dtype), gradients[2].to(gamma.dtype)]


def rmsnorm_fwd(
    input: torch.Tensor,  # noqa: A002 (TE passes it by name)
    weight: torch.Tensor,
    eps: float,
    ln_out: torch.Tensor | None,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor | None]:
    """Normalised rows, no means, inverse deviations."""
    refuse(quantizer=quantizer, ln_out=ln_out)
    x = input.float()
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    out = x * inverse * _gain(weight, zero_centered_gamma)
    return [out.to(TORCH_TYPE[int(otype)]), None, inverse.reshape(-1)]


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Gradients of the input and the gain."""
    gradient = dz.reshape(x.shape).float()
    inverse = rsigma.view(*x.shape[:-1], 1)
    normal = x.float() * inverse
    scaled = gradient * _gain(gamma, zero_centered_gamma)
    dx = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    dgamma = (gradient * normal).reshape(-1, x.shape[-1]).sum(0)
    return [dx.to(x.dtype), dgamma.to(gamma.dtype)]


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()
