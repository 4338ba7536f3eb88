"""What is derived from measured times; the times themselves are in ``test_bench_smoke``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lynx.cost import LayerCosts
from megatron_lynx.integration import measuring
from megatron_lynx.spec import Batch


@pytest.mark.parametrize(("contention", "window_ns"), [(1.0, 200 - 80), (1.5, 200 - 120), (3.0, 0)])
def test_the_heads_window_is_what_its_slowed_gemm_leaves(
    monkeypatch: pytest.MonkeyPatch, contention: float, window_ns: int
) -> None:
    def measured(rows: int, weight: torch.Tensor, bias: bool) -> int:
        assert (rows, tuple(weight.shape), bias) == (32, (8, 4), False)
        return 80

    monkeypatch.setattr(measuring, "wgrad_ns", measured)
    costs = LayerCosts(
        forward_ns={}, dgrad_ns={}, wgrad_ns={}, collective_ns={"bwd:linear_fc1": 200}, contention=contention
    )
    batch = Batch(seq_length=16, micro_batch_size=2, global_batch_size=2)
    body = SimpleNamespace(post_process=False)
    last: Any = SimpleNamespace(
        post_process=True, shared_embedding_or_output_weight=lambda: torch.zeros(8, 4)
    )
    assert measuring._head_window_ns([body], costs, batch) == 0
    assert measuring._head_window_ns([body, last], costs, batch) == window_ns
