"""Transformer Engine's own layers on the CPU reference, trained by stock Megatron: against local layers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.support import te_reference
from tests.support.launch import REPOSITORY, run_ranks

RANKS = "tests.megatron_te.te_ranks"
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
    "rope": True,
    "num_query_groups": 2,
    "add_bias_linear": False,
}
NEW_NAME = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""Part of a local layer's parameter name -> what TE's layer calls it, whose norms are in the linears."""


def pair(name: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Runs of the same model with local layers and with TE's."""
    options = {"steps": 2, **options}
    return {f"{name} local": options, f"{name} te": {"attention": "unfused", **options, "te": True}}


def one_rank() -> dict[str, dict[str, Any]]:
    runs = {
        **pair("plain", dropout=0.0),
        **pair("dropout", dropout=0.1),
        **pair("llama", **LLAMA, dropout=0.0),
    }
    for backend in ("fused", "flash"):
        options = {"te": True, "bf16": True, "steps": 2, "attention": backend}
        runs[backend] = {**options, "dropout": 0.0}
        runs[f"{backend} llama"] = {**options, **LLAMA, "dropout": 0.0, "apply_rope_fusion": True}
        runs[f"{backend} dropout"] = {**options, "dropout": 0.1}
    runs["unfused"] = {**runs["fused"], "attention": "unfused"}
    runs["unfused llama"] = {**runs["fused llama"], "attention": "unfused"}
    return runs


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(1, f"{RANKS}:train", one_rank(), te=True)[0]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    options = {"tp": 2, "sequence_parallel": True}
    runs = {**pair("plain", dropout=0.0, **options), **pair("dropout", dropout=0.1, **options)}
    runs["fused"] = {**options, "te": True, "bf16": True, "steps": 2, "attention": "fused", **LLAMA}
    return run_ranks(2, f"{RANKS}:train", runs, te=True)


def assert_equal(results: dict[str, Any], name: str, tolerance: float = 0.0) -> None:
    """TE's gradients and losses against local ones, step by step; bit for bit if no tolerance is given."""
    local, engine = results[f"{name} local"], results[f"{name} te"]
    assert local["losses"] == engine["losses"] or tolerance
    torch.testing.assert_close(local["losses"], engine["losses"], rtol=tolerance, atol=tolerance)
    assert len(local["gradients"]) == 2
    for ours, theirs in zip(local["gradients"], engine["gradients"], strict=True):
        assert len(ours) == len(theirs)
        for parameter, gradient in ours.items():
            for old, new in NEW_NAME.items():
                parameter = parameter.replace(old, new)
            torch.testing.assert_close(gradient, theirs[parameter], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_fp32_layers_with_layernorm_equal_local_ones_bit_for_bit(alone: dict[str, Any], name: str) -> None:
    assert_equal(alone, name)


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_so_do_they_under_sequence_parallelism(two_ranks: list[dict[str, Any]], name: str) -> None:
    for results in two_ranks:
        assert_equal(results, name)


def test_llama_layers_equal_local_ones_but_for_rounding(alone: dict[str, Any]) -> None:
    assert_equal(alone, "llama", tolerance=1e-5)


@pytest.mark.parametrize("name", ["", " llama"])
@pytest.mark.parametrize("backend", ["fused", "flash"])
def test_attention_in_one_kernel_equals_unfused_attention_but_for_rounding(
    alone: dict[str, Any], backend: str, name: str
) -> None:
    fused, unfused = alone[backend + name], alone["unfused" + name]
    torch.testing.assert_close(fused["losses"], unfused["losses"], rtol=0, atol=5e-3)
    assert fused["losses"] != unfused["losses"]


def test_each_backend_ran_where_it_was_asked_for(alone: dict[str, Any]) -> None:
    # 2 steps, 4 microbatches, 4 layers
    for name, kernel in (("fused", "fused_attn"), ("flash", "flash_attn"), ("fused dropout", "fused_attn")):
        calls = alone[name]["calls"]
        assert calls[f"{kernel}_fwd"] == calls[f"{kernel}_bwd"] == 32
        assert [k for k in calls if "attn" in k] == [f"{kernel}_fwd", f"{kernel}_bwd"]
    assert not [k for k in alone["unfused"]["calls"] if "attn" in k]
    assert alone["fused llama"]["calls"]["fused_rope_forward"] == 64
    # Two norms and four linears a layer, and the last norm; a linear has two products in its backward.
    assert alone["unfused"]["calls"]["layernorm_fwd"] == 8 * (4 * 2 + 1)
    assert alone["unfused"]["calls"]["generic_gemm"] == 8 * 4 * 4 * 3


def test_dropout_changes_what_is_computed(alone: dict[str, Any]) -> None:
    for backend in ("fused", "flash"):
        assert alone[f"{backend} dropout"]["losses"] != alone[backend]["losses"]


@pytest.mark.parametrize("version", te_reference.VERSIONS[1:])
def test_other_versions_compute_the_same(alone: dict[str, Any], version: str) -> None:
    names = ("plain te", "dropout te", "llama te", "fused llama", "flash dropout")
    runs = {name: options for name, options in one_rank().items() if name in names}
    results = run_ranks(1, f"{RANKS}:train", runs, te=version)[0]
    for name in names:
        assert results[name]["losses"] == alone[name]["losses"], name
        assert results[name]["calls"] == alone[name]["calls"], name


def test_the_scripts_install_what_the_tests_load() -> None:
    script = (REPOSITORY / "scripts" / "setup_env.sh").read_text()
    found = re.search(r"for version in (.*); do\n\s+lynx_te ", script)
    assert found
    assert tuple(found[1].split()) == te_reference.VERSIONS


def test_a_missing_version_is_an_error_that_says_how_to_install_it() -> None:
    with pytest.raises(FileNotFoundError, match=r"lynx_te 1\.0\.0"):
        run_ranks(1, f"{RANKS}:train", {}, te="1.0.0")


def test_what_stops_a_run_without_lynx() -> None:
    """The reference lacks a kernel; Megatron's norms take no residuals in fp32 beside 16-bit weights, which
    is why lynx refuses them: once they do, these messages go, and so must the refusal."""
    wide = {"bf16": True, "fp32_residual_connection": True}
    models = [
        {**wide, "te": True, "attention": "unfused"},
        {**wide, "te": True, "attention": "unfused", "normalization": "RMSNorm"},
        wide,
        {**wide, "normalization": "RMSNorm"},
    ]
    missing, *stops = run_ranks(1, f"{RANKS}:what_stops", models, te=True)[0]
    assert missing == "transformer_engine_torch.moe_permute_fwd is not in the CPU reference"
    assert [message.split(":")[0] for message in stops] == [
        *["Data types for parameters must match when outside of autocasted region. Found input dtype"] * 2,
        "mixed dtype (CPU)",
        "expected m1 and m2 to have the same dtype, but got",
    ]
