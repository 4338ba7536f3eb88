"""The storage meter counts what a program makes, once, while it lives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_lynx.profiler.meter import StorageMeter

FLOATS = 1000
BYTES = 4 * FLOATS


def test_new_storages_count_while_they_live() -> None:
    with StorageMeter() as meter:
        first = torch.zeros(FLOATS)
        second = first + 1
        assert meter.live_bytes == 2 * BYTES
        del first
        assert meter.live_bytes == BYTES
    del second
    assert meter.live_bytes == 0  # a storage that outlives the block still leaves the count
    assert meter.peak_bytes == 2 * BYTES


def test_views_and_writes_in_place_are_no_new_storage() -> None:
    before = torch.zeros(FLOATS)
    with StorageMeter() as meter:
        before.view(10, -1).t().add_(1)
        before.detach().mul_(2)
        assert meter.peak_bytes == 0
        view = (before + 1)[: FLOATS // 2]  # half of it is enough to keep the whole alive
        assert meter.live_bytes == BYTES
        assert view.numel() == FLOATS // 2


def test_a_reused_address_is_counted_again() -> None:
    with StorageMeter() as meter:
        for _ in range(5):
            torch.zeros(FLOATS)
            assert meter.live_bytes == 0
    assert meter.peak_bytes == BYTES


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = _Square.apply(x)
    return x


@pytest.mark.parametrize(("recompute", "saved"), [(False, 7), (True, 0)])
def test_what_is_saved_for_the_backward_pass_counts_until_it_is_used(recompute: bool, saved: int) -> None:
    x = torch.full((FLOATS,), 0.5, requires_grad=True)
    with StorageMeter() as meter:
        y = checkpoint(_chain, x, use_reentrant=False) if recompute else _chain(x)
        assert meter.live_bytes == (saved + 1) * BYTES  # and the output
        y.sum().backward()
        del y
        assert x.grad is not None
        assert meter.live_bytes == x.grad.untyped_storage().nbytes()
    assert meter.peak_bytes > 7 * BYTES  # rebuilt activations count too
