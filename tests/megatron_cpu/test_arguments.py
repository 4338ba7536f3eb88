"""The command line: one flag is enough, and what does not work is refused with what does."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import arguments

from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.errors import ConfigError
from megatron_lynx.integration.arguments import check_arguments, check_config, with_lynx_arguments
from megatron_lynx.integration.planning import split_layout
from megatron_lynx.integration.refusals import NEWER, REFUSALS, Refusal

MODEL = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--transformer-impl", "local"),
]
FLAGS = {
    "--lynx-plan",
    "--lynx-planner",
    "--lynx-budget",
    "--lynx-partition",
    "--lynx-profile",
    "--lynx-report",
}


def parsed(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *MODEL, *flags])
    args: Namespace = arguments.parse_args(with_lynx_arguments(None))
    return args


def test_the_method_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    check_arguments(parsed(monkeypatch, "--recompute-method", "lynx"))


def test_without_the_method_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_arguments(parsed(monkeypatch, "--recompute-granularity", "selective", "--num-experts", "2"))


def test_the_set_of_flags_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    parser = with_lynx_arguments(None)(argparse.ArgumentParser())
    assert {a.option_strings[0] for a in parser._actions} - {"-h"} == FLAGS


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_every_refusal_fires_and_says_what_works(monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    args = vars(parsed(monkeypatch, "--recompute-method", "lynx"))
    found = [(check_arguments, Namespace(**{**args, field: "something"})) for field in refusal.fields]
    found += [(check_config, Namespace(**{field: "something"})) for field in refusal.config]
    for check, owner in found:
        with pytest.raises(ConfigError) as caught:
            check(owner)
        message = str(caught.value)
        for part in ("--recompute-method lynx", refusal.flag, "something", refusal.reason, refusal.instead):
            assert part in message


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_a_refusal_looks_where_megatron_has_it(monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    """A name that Megatron does not know would never fire; its own defaults must not."""
    args = parsed(monkeypatch, "--recompute-method", "lynx")
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, transformer_impl="local")
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert refusal.fields or refusal.config
    for name in {*refusal.fields, *refusal.config} - NEWER.keys():
        assert name not in refusal.fields or hasattr(args, name), name
        assert name not in refusal.config or name in known, name
    refusal.check(args, refusal.fields)
    refusal.check(config, refusal.config)
    assert not any(hasattr(args, name) or name in known for name in NEWER)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--recompute-granularity", "full"], ["--recompute-granularity full", "leave it out"]),
        (["--recompute-activations"], ["--recompute-activations True", "leave it out"]),
        (["--recompute-modules", "core_attn", "mlp"], ["--recompute-modules core_attn mlp", "leave it out"]),
        (["--cpu-offloading-num-layers", "1"], ["--cpu-offloading-num-layers 1", "saved-tensor hooks"]),
        (["--tensor-parallel-num-weight-shards", "2"], ["--tensor-parallel-num-weight-shards 2", "leave it"]),
        (["--num-experts", "4"], ["--num-experts 4", "dense models work"]),
        (["--delay-wgrad-compute"], ["--delay-wgrad-compute True", "two microbatches", "leave it out"]),
        (["--fp32-residual-connection"], ["--fp32-residual-connection True", "first norm", "leave it out"]),
        (["--fp8-format", "hybrid"], ["--fp8-format hybrid", "--bf16 works"]),
        (["--use-megatron-fsdp"], ["--use-megatron-fsdp True", "--use-distributed-optimizer works"]),
        (["--transformer-impl", "inference_optimized"], ["inference_optimized", "--transformer-impl local"]),
        (["--lynx-plan", "no/such/file"], ["--lynx-plan no/such/file", "lynx plan"]),
        (["--lynx-budget", "32"], ["--lynx-budget '32'", "32GiB"]),
        (["--lynx-plan", __file__, "--lynx-planner", "opt"], ["--lynx-plan", "--lynx-planner opt"]),
        (
            ["--group-query-attention", "--num-query-groups", "1", "--tensor-model-parallel-size", "2"],
            ["--num-query-groups 1", "--num-query-groups 2 works"],
        ),
    ],
)  # fmt: skip
def test_real_flags_are_refused(monkeypatch: pytest.MonkeyPatch, flags: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_arguments(parsed(monkeypatch, "--recompute-method", "lynx", *flags))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("flags", [["--lynx-budget", "8GiB"], ["--lynx-partition", "search"]])
def test_lynx_flags_need_the_method(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{flags[0]} {flags[1]} needs --recompute-method lynx"):
        check_arguments(parsed(monkeypatch, *flags))


def test_no_flag_of_the_users_is_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = parsed(monkeypatch, "--recompute-method", "lynx", "--lynx-budget", "8GiB")
    before: dict[str, Any] = dict(vars(args))
    check_arguments(args)
    assert vars(args) == before


def profile(path: Path, head_ns: int) -> Path:
    """A table of costs in which a layer takes 2 ms and the head ``head_ns`` more than the others."""
    layer = LayerCosts(forward_ns={"linear_fc1": 1_000_000}, dgrad_ns={"linear_fc1": 1_000_000}, wgrad_ns={})
    path.write_text(CostTable(layer=layer, head_forward_ns=head_ns, head_backward_ns=head_ns).to_json())
    return path


PP2 = ("--recompute-method", "lynx", "--pipeline-model-parallel-size", "2", "--global-batch-size", "8")


@pytest.mark.parametrize(("head_ns", "layout"), [(0, None), (2_000_000, "Ettt|tL")])
def test_a_partition_moves_layers_away_from_a_heavy_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head_ns: int, layout: str | None
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = profile(tmp_path / "costs.json", head_ns)
    flags = ["--lynx-partition", "search", "--lynx-profile", str(path)]
    args = parsed(monkeypatch, *PP2, "--vocab-size", "256", *flags)
    check_arguments(args)
    assert split_layout(args, 1 << 60) == layout


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ["needs costs before the model is built", "--lynx-profile FILE"]),
        (["--pipeline-model-parallel-layout", "Et*2|t*2L"], ["exclude each other", "keep works"]),
        (["--num-layers-per-virtual-pipeline-stage", "1"], ["exclude each other", "keep works"]),
        (["--pipeline-model-parallel-size", "1"], ["above 1", "keep works"]),
    ],
)
def test_a_partition_that_somebody_else_decides_is_refused(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], parts: list[str]
) -> None:
    args = parsed(monkeypatch, *PP2, "--lynx-partition", "search", *flags)
    with pytest.raises(ConfigError) as caught:
        check_arguments(args)
    for part in ("--lynx-partition search", *parts):
        assert part in str(caught.value)
