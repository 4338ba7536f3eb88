"""What is derived from measured times; the times themselves are in ``test_bench_smoke``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lynx.cost import LayerCosts
from megatron_lynx.integration.measuring import layer as measuring
from tests.support.launch import run_ranks


@pytest.mark.parametrize(("contention", "window_ns"), [(1.0, 200 - 80), (1.5, 200 - 120), (3.0, 0)])
def test_the_heads_window_is_what_its_slowed_gemm_leaves(
    monkeypatch: pytest.MonkeyPatch, contention: float, window_ns: int
) -> None:
    def measured(rows: int, weight: torch.Tensor, bias: bool) -> int:
        assert (rows, tuple(weight.shape), bias) == (32, (8, 4), False)
        return 80

    monkeypatch.setattr(measuring, "wgrad_ns", measured)
    costs = LayerCosts(forward_ns={}, dgrad_ns={}, wgrad_ns={}, contention=contention)
    body = SimpleNamespace(post_process=False)
    last: Any = SimpleNamespace(
        post_process=True, shared_embedding_or_output_weight=lambda: torch.zeros(8, 4)
    )
    assert measuring._head_window_ns([body], costs, 200, 32) == 0
    assert measuring._head_window_ns([body, last], costs, 200, 32) == window_ns


LAYER = LayerCosts(
    forward_ns={"linear_fc1": 4000, "activation": 1000},
    dgrad_ns={"linear_fc1": 3000, "activation": 2000},
    wgrad_ns={"linear_fc1": 3000},
    collective_ns={"fwd:linear_fc2": 700, "bwd:linear_fc1": 5000},
    beside=("linear_fc1",),
    contention=1.25,
)


@pytest.mark.parametrize("pace", [0.5, 1.0, 1.7])
def test_a_layer_in_step_takes_what_the_whole_layer_took(pace: float) -> None:
    forward_ns = round(5000 * pace) + 700
    # The collective hides the GEMM while 1.25 * 3000 * pace <= 5000, and is hidden by it otherwise.
    gemm = 3000 * pace
    backward_ns = round(5000 * pace + max(5000, gemm + 5000 * (1 - 1 / 1.25)))
    found = measuring.in_step(LAYER, forward_ns, backward_ns)
    assert found.layer_forward_ns == pytest.approx(forward_ns, rel=2e-3)
    assert found.layer_backward_ns == pytest.approx(backward_ns, rel=2e-3)
    assert found.forward_ns["linear_fc1"] == pytest.approx(4000 * pace, rel=3e-3)
    assert found.wgrad_ns["linear_fc1"] == pytest.approx(3000 * pace, rel=3e-3)
    assert (found.collective_ns, found.contention) == (LAYER.collective_ns, LAYER.contention)


def test_a_pace_beyond_belief_is_not_taken() -> None:
    found = measuring.in_step(LAYER, 10, 10**9)
    told = measuring.beyond_belief(LAYER, 10, 10**9)
    assert "a forward took 10 ns as a whole" in told
    assert "0.25 times its parts is believed" in told
    assert "a backward took 1.000 s as a whole" in told
    assert "4 times its parts is believed" in told
    assert measuring.beyond_belief(LAYER, LAYER.layer_forward_ns, LAYER.layer_backward_ns) == ""
    assert found.forward_ns["linear_fc1"] == pytest.approx(4000 * measuring.FASTEST, rel=5e-3)
    assert found.wgrad_ns["linear_fc1"] == pytest.approx(3000 * measuring.SLOWEST, rel=5e-3)


def test_measuring_leaves_everything_as_it_was() -> None:
    """No hook fires, no counter moves, no buffer, gradient or random state changes; what does not train
    costs no weight gradient, and no gather of its input."""
    trained = {
        "": [["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"], []],
        "linears": [[], []],
        "adapters": [[], []],
        "first": [
            ["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"],
            ["bwd:linear_fc1.gather", "bwd:linear_qkv.gather"],
        ],
    }
    asked = [{"frozen": what, "sequence_parallel": bool(what)} for what in trained]
    for rank in run_ranks(2, "tests.megatron_cpu.fault_ranks:touched", asked, timeout_s=120):
        for found, costs in zip(rank, trained.values(), strict=True):
            assert found == {
                "fired": [],
                "modules": [],
                "random": True,
                "gradients": True,
                "costs": costs,
            }
