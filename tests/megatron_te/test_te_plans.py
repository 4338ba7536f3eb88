"""Transformer Engine layers trained under plans are what stock trains, to the last bit, dropout on.

TE's own Python runs over the CPU reference of its kernels. Losses, every parameter's gradient, gradient norms
and weights after three optimizer steps are compared with stock Megatron without recomputation.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron_cpu.lynx_ranks import Case
from tests.megatron_cpu.test_bitwise import NAMED, check_outcomes, drawn_plans
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
RANDOM_PLANS = {1: 6, 2: 3, 4: 2}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_to_the_last_bit(world_size: int) -> None:
    asked = [
        Case(model, [*NAMED, *drawn_plans(model, RANDOM_PLANS[world_size])]) for model in MODELS[world_size]
    ]
    results = run_ranks(world_size, COMPARE, asked, timeout_s=570, te=True)
    check_outcomes(asked, results)


def test_an_attention_that_moves_the_generator_at_dropout_0() -> None:
    """cuDNN's kernel does; what draws after it must find the generator where it left it."""
    assert te_reference.Settings.attention_moves_generator
    model = {**LLAMA, **SP, "pp": 2, "attention_dropout": 0.0}
    asked = [Case(model, [*NAMED, *drawn_plans(model, 3)])]
    results = run_ranks(4, COMPARE, asked, timeout_s=570, te=True)
    check_outcomes(asked, results)


def test_the_newest_transformer_engine() -> None:
    asked = [Case(model, ["full", "windows"]) for model in (GPT, LLAMA)]
    results = run_ranks(1, COMPARE, asked, timeout_s=570, te=te_reference.VERSIONS[-1])
    check_outcomes(asked, results)


def test_what_a_dropped_region_costs() -> None:
    """By region that is dropped: kernels beyond stock's, in one step of 4 layers and 4 microbatches."""
    model = {**GPT, "dropout": 0.0}
    regions = ["input_layernorm", "linear_qkv", "linear_proj", "pre_mlp_layernorm", "linear_fc1"]
    (found,) = run_ranks(1, "tests.megatron_te.te_ranks:extra_kernels", (model, regions), te=True)
    assert found == {
        "input_layernorm": {"layernorm_fwd": 16},
        "linear_qkv": {"generic_gemm": 16},
        "linear_proj": {},
        "pre_mlp_layernorm": {"layernorm_fwd": 16},
        "linear_fc1": {},  # the activation adds the bias and saves that sum
    }
