"""A Transformer Engine layer, from its shape alone and from a real run: the same regions and storages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron_cpu.test_bitwise import LLAMA
from tests.megatron_cpu.test_graph import ACTIVATIONS, BF16, described, drop_sets
from tests.megatron_te.test_te_plans import EXCHANGED, GATHERED, PACKED
from tests.support import te_reference
from tests.support.launch import run_ranks
from tests.support.small_gpt import LAYERS

ROPE, GQA, MQA = {"rope": True}, {"num_query_groups": 2}, {"num_query_groups": 1}
NORMED, GATE, ONE = {"qk_layernorm": True}, {"attention_output_gate": True}, {"shape": (1, 16)}
RMS = {"normalization": "RMSNorm"}


def with_kernel(attention: str, *options: dict[str, Any]) -> list[dict[str, Any]]:
    """The options with 16-bit attention of this kind."""
    return [{**BF16, "attention": attention, **one} for one in options]


UNFUSED: list[dict[str, Any]] = [
    {"attention": "unfused", **one}
    for one in (
        *({}, {"dropout": 0.0}, ROPE, {**ROPE, **GQA}, NORMED, GATE, *ACTIVATIONS),
        {"add_bias_linear": False, "use_te_activation_func": True},
    )
]
FUSED_SOFTMAX = with_kernel("unfused", {"shape": (2, 32)}, {"shape": (2, 32), "dropout": 0.0})
OPTIONS: dict[int, list[dict[str, Any]]] = {
    1: [
        *UNFUSED,
        *with_kernel("unfused", {}, {"dropout": 0.0}, {**GQA, **RMS}, MQA, {**MQA, **ONE}),
        *FUSED_SOFTMAX,
        *with_kernel("unfused", {"softmax_type": "off-by-one"}, {"window_size": (4, 0)}),
        *with_kernel("unfused", {"softmax_type": "learnable", "dropout": 0.0, "shape": (2, 32)}),
        *with_kernel("fused", {}, {"dropout": 0.0}, GQA, MQA, ROPE, {**LLAMA, "apply_rope_fusion": True}),
        *with_kernel("fused", {**ROPE, "rotary_percent": 0.5}, {**ROPE, "rotary_interleaved": True}),
        *with_kernel("fused", NORMED, {**NORMED, **ROPE, **RMS, **GQA}, {**NORMED, **MQA}),
        *with_kernel("fused", GATE, {**GATE, **GQA, **ROPE}, {"layernorm_zero_centered_gamma": True}),
        *with_kernel("fused", {"softmax_type": "off-by-one"}, {"softmax_type": "learnable"}),
        *with_kernel("fused", {**ONE, **GQA, **ROPE}, ONE, {**ONE, **MQA}),
        *with_kernel("flash", {}, {"dropout": 0.0}, GQA, MQA, ROPE, LLAMA, {"window_size": (4, 0)}),
        *with_kernel("flash", ONE, {**ONE, **GQA}, {**ONE, **GQA, **ROPE}, {**ONE, **MQA}, {**ONE, **NORMED}),
        *with_kernel("flash", {**GATE, **ONE}, GATE),
        *with_kernel("fused", PACKED, {**PACKED, **LLAMA}),
    ],
    2: [
        {"tp": 2, "attention": "unfused"},
        *with_kernel("fused", {"tp": 2}, {"tp": 2, "sequence_parallel": True, **LLAMA}),
        *with_kernel("flash", {"tp": 2, "sequence_parallel": True}, {"tp": 2, **LLAMA}),
        *with_kernel("fused", *({**cp, **one} for cp in (GATHERED, EXCHANGED) for one in ({}, LLAMA, GQA))),
    ],
}


@pytest.mark.parametrize(
    ("world_size", "version"),
    [(1, version) for version in te_reference.VERSIONS] + [(2, te_reference.VERSIONS[0])],
)
def test_regions_and_storages_are_in_bijection(world_size: int, version: str) -> None:
    # The newest keeps the scale of its fused softmax as a number, not in 4 bytes on the device.
    newest = version == te_reference.VERSIONS[-1]
    options = [{"te": True, **one} for one in OPTIONS[world_size] if not (newest and one in FUSED_SOFTMAX)]
    for graphs in run_ranks(world_size, "tests.megatron_cpu.graph_ranks:both_graphs", options, te=version):
        assert len(graphs) == len(options)
        for model, (traced, analytic) in zip(options, graphs, strict=True):
            assert described(traced) == described(analytic), model


@pytest.mark.parametrize("world_size", [1, 2])
def test_kept_bytes_are_those_of_the_graph(world_size: int) -> None:
    cases = []
    for model in OPTIONS[world_size]:
        masks = () if model.get("dropout", 0.1) else ("self_attn_dropout", "mlp_dropout")
        for plan in drop_sets(2):
            chosen = {k: {r: c for r, c in v.items() if r not in masks} for k, v in plan.items()}
            cases.append(({"te": True, **model}, chosen))
    for found in run_ranks(world_size, "tests.megatron_cpu.graph_ranks:kept_and_predicted", cases, te=True):
        assert len(found) == len(cases)
        for case, layers in zip(cases, found, strict=True):
            assert len(layers) == LAYERS
            assert all(kept == predicted > 0 for kept, predicted in layers), (case, layers)
