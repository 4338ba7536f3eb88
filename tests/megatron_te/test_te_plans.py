"""Transformer Engine layers trained under plans are what stock trains, to the last bit, dropout on.

TE's own Python runs over the CPU reference of its kernels. Losses, every parameter's gradient, gradient norms
and weights after three optimizer steps are compared with stock Megatron without recomputation.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron_cpu.lynx_ranks import Assignment, Case
from tests.megatron_cpu.test_bitwise import (
    NAMED,
    check_outcomes,
    drawn_beginnings,
    drawn_plans,
    with_options,
)
from tests.support import te_reference
from tests.support.launch import run_ranks

COMPARE = "tests.megatron_cpu.lynx_ranks:compare"
GPT: dict[str, Any] = {"te": True, "attention": "unfused"}
LLAMA: dict[str, Any] = {
    "te": True,
    "bf16": True,
    "attention": "fused",
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
    "rope": True,
    "num_query_groups": 2,
    "add_bias_linear": False,
}
TP: dict[str, Any] = {"tp": 2}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}

MODELS: dict[int, list[dict[str, Any]]] = {
    1: [
        GPT,
        {**GPT, "bf16": True, "attention": "fused"},
        {**GPT, "bf16": True, "attention": "flash"},
        LLAMA,
        {**LLAMA, "attention": "flash", "apply_rope_fusion": True, "bias_activation_fusion": True},
        {**LLAMA, "attention": "unfused", "bf16": False, "qk_layernorm": True, "attention_output_gate": True},
    ],
    2: [{**one, **sizes} for one in (GPT, LLAMA) for sizes in (TP, SP, {"pp": 2}, {"pp": 2, "vpp": 2})],
    4: [
        {**GPT, **TP, "pp": 2},
        {**LLAMA, **SP, "pp": 2},
        {**LLAMA, **SP, "pp": 2, "vpp": 2},
    ],
}
RANDOM_PLANS = {1: 8, 2: 5, 4: 6}


def plans_for(model: dict[str, Any], count: int) -> list[str | Assignment]:
    """The named plans and ``count`` drawn ones, and half as many beginnings of layers."""
    return [*NAMED, *drawn_plans(model, count), *drawn_beginnings(count // 2)]


PACKED: dict[str, Any] = {"lengths": "packed", "shape": (1, 16)}
GATHERED, EXCHANGED = {"cp": 2, "cp_comm_type": "all_gather"}, {"cp": 2, "cp_comm_type": "a2a"}
OPTIONS: dict[int, list[dict[str, Any]]] = {
    1: [
        {**GPT, "frozen": "first"},
        {**LLAMA, "frozen": "linears"},
        {**LLAMA, **PACKED, "apply_rope_fusion": True},
        {**GPT, **PACKED, "bf16": True, "attention": "flash"},
    ],
    2: [
        {**LLAMA, **SP, "frozen": "adapters"},
        {**LLAMA, **SP, "mtp_num_layers": 1},
        {**LLAMA, **PACKED, "pp": 2},
        {**LLAMA, **GATHERED},
        {**GPT, **EXCHANGED, "bf16": True, "attention": "fused"},
    ],
    4: [
        {**LLAMA, **SP, **EXCHANGED, "num_query_groups": 4},  # each rank needs a group for each
        {**LLAMA, **GATHERED, "pp": 2},
    ],
}
"""What changes around the layers, which of them train, and attention that communicates. Keys and values that
are passed on from rank to rank (``--cp-comm-type p2p``) hang over gloo: that was not run."""


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_to_the_last_bit(world_size: int) -> None:
    asked = [
        *(Case(model, plans_for(model, RANDOM_PLANS[world_size])) for model in MODELS[world_size]),
        *with_options(OPTIONS[world_size]),
    ]
    results = run_ranks(world_size, COMPARE, asked, timeout_s=570, te=True)
    check_outcomes(asked, results)


def test_an_attention_that_moves_the_generator_at_dropout_0() -> None:
    """cuDNN's kernel does; what draws after it must find the generator where it left it."""
    assert te_reference.Settings.attention_moves_generator
    model = {**LLAMA, **SP, "pp": 2, "attention_dropout": 0.0}
    asked = [Case(model, plans_for(model, 6))]
    results = run_ranks(4, COMPARE, asked, timeout_s=570, te=True)
    check_outcomes(asked, results)


def test_the_newest_transformer_engine() -> None:
    asked = [Case(model, ["full", "windows"]) for model in (GPT, LLAMA)]
    results = run_ranks(1, COMPARE, asked, timeout_s=570, te=te_reference.VERSIONS[-1])
    check_outcomes(asked, results)


def test_what_a_dropped_region_costs() -> None:
    """By region that is dropped: kernels and collectives beyond stock's, in one step of 4 layers and 4
    microbatches. A norm is rebuilt without the GEMM and the collective of its linear; with sequence
    parallelism that linear, behind it, gathers its input once more."""
    regions = ["input_layernorm", "linear_qkv", "linear_proj", "pre_mlp_layernorm", "linear_fc1"]
    models = [{**GPT, **sizes, "dropout": 0.0} for sizes in (TP, SP)]
    norm, gemm, gather = {"layernorm_fwd": 16}, {"generic_gemm": 16}, {"all_gather_single": 16}
    # No backward reads the outputs of linear_proj and, with a bias, of linear_fc1.
    tp = {
        "input_layernorm": norm,
        "linear_qkv": gemm,
        "pre_mlp_layernorm": norm,
        "linear_proj": {},
        "linear_fc1": {},
    }
    for found in run_ranks(2, "tests.megatron_te.te_ranks:extra_work", (models, regions), te=True):
        assert found == [tp, {**tp, "linear_qkv": gemm | gather}]
