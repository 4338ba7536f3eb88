"""Stock Megatron on the CPU backend: it trains, in every parallel form, and leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from tests.support.launch import REPOSITORY, RanksFailedError, run_ranks

# Megatron and torch are imported in the ranks and in subprocesses only: this file is also collected.
STEPS = 3


def train(rank: int, world_size: int, payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train one small GPT for each configuration; returns losses and checks for each."""
    from tests.support.small_gpt import train_small_gpt

    return [train_small_gpt(steps=STEPS, **configuration) for configuration in payload]


TWO_RANKS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "tp2_sp_rms": {"tp": 2, "sequence_parallel": True, "normalization": "RMSNorm"},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "dp2": {},
    "tp2_bf16": {"tp": 2, "bf16": True},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_pp2_sp": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "tp2_pp2_vpp2_sp": {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize(("world_size", "configurations"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_stock_megatron_trains(world_size: int, configurations: dict[str, dict[str, Any]]) -> None:
    results = run_ranks(world_size, f"{__name__}:train", list(configurations.values()), timeout_s=400)
    for name, by_rank in zip(configurations, zip(*results, strict=True), strict=True):
        losses = [rank["losses"] for rank in by_rank if rank["losses"]]
        assert losses, name
        print(name, [rank["losses"] for rank in by_rank])
