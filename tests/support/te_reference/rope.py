"""Rotary embedding of one tensor in one kernel, and of several sequences in one row of tokens."""

from __future__ import annotations

import torch

from tests.support.te_reference.facts import refuse
from tests.support.te_reference.loading import Member

KERNELS = ("fused_rope_forward", "fused_rope_backward")


def fused_rope_forward(
    input: torch.Tensor,  # noqa: A002 (the extension's name)
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Member,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """``input`` turned by ``freqs`` (angles, [positions, 1, 1, width], fp32); what is wider is left."""
    refuse(start_positions=start_positions, cp_size=None if cp_size == 1 else cp_size)
    return _turned(input, _angles(input, freqs, qkv_format.name, cu_seqlens), 1.0, interleaved)


def fused_rope_backward(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Member,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """The gradient, turned back."""
    refuse(start_positions=start_positions, cp_size=None if cp_size == 1 else cp_size)
    angles = _angles(output_grads, freqs, qkv_format.name, cu_seqlens)
    return _turned(output_grads, angles, -1.0, interleaved)


def _angles(x: torch.Tensor, freqs: torch.Tensor, form: str, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The angles of every token, in a shape that multiplies with ``x``."""
    if form == "NVTE_SBHD":
        return freqs[: x.shape[0]]
    if form == "NVTE_BSHD":
        return freqs[: x.shape[1]].transpose(0, 1)
    if form != "NVTE_THD" or cu_seqlens is None:
        refuse(qkv_format=form)
        raise AssertionError
    lengths = cu_seqlens.diff().tolist()
    return torch.cat([freqs[:length] for length in lengths])[:, 0]


def _turned(x: torch.Tensor, angles: torch.Tensor, sign: float, interleaved: bool) -> torch.Tensor:
    width = angles.shape[-1]
    inner, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        quarter = torch.stack((-inner[..., 1::2], inner[..., 0::2]), -1).flatten(-2)
    else:
        quarter = torch.cat((-inner[..., width // 2 :], inner[..., : width // 2]), -1)
    turned = inner * torch.cos(angles).float() + sign * quarter * torch.sin(angles).float()
    return torch.cat((turned.to(x.dtype), rest), -1)
