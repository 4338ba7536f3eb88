"""A layer's regions and storages, from its shape alone and from a real run, are the same.

This is the test that notices first when Megatron's layer changes.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from megatron_lynx.graph import LayerGraph
from tests.megatron_cpu.lynx_ranks import EVERYTHING, Assignment
from tests.megatron_cpu.test_bitwise import LLAMA, SWIGLU
from tests.support.launch import run_ranks
from tests.support.small_gpt import LAYERS
from tests.support.strategies import drawn_for_layers

FUSED = {"bias_activation_fusion": True}
BF16 = {"bf16": True}
_GATED = {"gated_linear_unit": True}
ACTIVATIONS: list[dict[str, Any]] = [
    {"activation": "squared_relu"},
    {"activation": "squared_relu", "add_bias_linear": False},
    {**_GATED, "activation": "quick_gelu"},
    {**_GATED, "activation": "quick_gelu", "add_bias_linear": False, **BF16},
    {**_GATED, "activation": "quick_gelu", "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
    {**SWIGLU, "activation_func_clamp_value": 7.0},
    {**_GATED, **FUSED},
]
OPTIONS: dict[int, list[dict[str, Any]]] = {
    1: [
        {},
        BF16,
        {"dropout": 0.0},
        FUSED,
        {"add_bias_linear": False},
        SWIGLU,
        {**SWIGLU, "add_bias_linear": True},
        {**SWIGLU, **FUSED},
        {**SWIGLU, **FUSED, "add_bias_linear": True},
        {"rope": True},
        {"num_query_groups": 2},
        {"num_query_groups": 1},
        {"num_query_groups": 1, "rope": True},
        {"normalization": "RMSNorm"},
        {"normalization": "RMSNorm", **BF16},
        {"attention_softmax_in_fp32": True, **BF16},
        {"attention_softmax_in_fp32": True, **BF16, "dropout": 0.0},
        LLAMA,
        {**LLAMA, **FUSED, **BF16},
        *ACTIVATIONS,
        {"qk_layernorm": True},
        {"qk_layernorm": True, "num_query_groups": 2, "rope": True, **BF16},
        {"qk_layernorm": True, "normalization": "RMSNorm", **BF16},
        {"attention_output_gate": True},
        {"attention_output_gate": True, "num_query_groups": 2, **BF16},
        {"rope": True, "rotary_percent": 0.5},
        {"rope": True, "rotary_interleaved": True},
        {"window_size": (4, 0)},
        {"softmax_type": "off-by-one", **BF16, "dropout": 0.0},
        {"softmax_type": "learnable", "attention_softmax_in_fp32": False, **BF16},
        {"apply_query_key_layer_scaling": True, **BF16},
        {"shape": (1, 24), "num_query_groups": 1},
    ],
    2: [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True, **BF16, "dropout": 0.0},
        {"tp": 2, "sequence_parallel": True, **LLAMA},
        {"tp": 2, **LLAMA, **BF16},
    ],
}


def described(graph: LayerGraph) -> dict[str, tuple[Any, ...]]:
    """Each region: bytes saved by some backward, bytes only passed on, who it needs, its kind."""
    found = {}
    for region in graph.regions:
        made = graph.produced_by(region.name)
        saved = sum(s.size_bytes for s in made if s.saved_by)
        savers = {saver for s in made for saver in s.saved_by}
        passed = sum(s.size_bytes for s in made if not s.saved_by)
        needs = graph.inputs_of(region.name)
        found[region.name] = (saved, savers, passed, needs, region.communicates, region.draws)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_regions_and_storages_are_in_bijection(world_size: int) -> None:
    options = OPTIONS[world_size]
    for graphs in run_ranks(world_size, "tests.megatron_cpu.graph_ranks:both_graphs", options):
        assert len(graphs) == len(options)
        for model, (traced, analytic) in zip(options, graphs, strict=True):
            assert described(traced) == described(analytic), model


def drop_sets(count: int) -> list[Assignment]:
    """Random sets of regions to drop, one per layer."""
    layer = st.fixed_dictionaries({region: st.sampled_from(("keep", "demand")) for region in EVERYTHING})

    return drawn_for_layers(layer, LAYERS, count)


@pytest.mark.parametrize("world_size", [1, 2])
def test_kept_bytes_are_those_of_the_graph(world_size: int) -> None:
    cases = []
    for model in OPTIONS[world_size]:
        masks = () if model.get("dropout", 0.1) else ("self_attn_dropout", "mlp_dropout")
        for plan in drop_sets(3):
            cases.append(
                (model, {k: {r: c for r, c in v.items() if r not in masks} for k, v in plan.items()})
            )
    for found in run_ranks(world_size, "tests.megatron_cpu.graph_ranks:kept_and_predicted", cases):
        assert len(found) == len(cases)
        for case, layers in zip(cases, found, strict=True):
            assert len(layers) == LAYERS
            assert all(kept == predicted > 0 for kept, predicted in layers), (case, layers)
