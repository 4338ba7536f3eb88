"""Model, Parallel, Batch: derived sizes, and every nonsense is named with a value that works."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.errors import ConfigError
from megatron_lynx.job import check_job
from megatron_lynx.presets import load_model, make_model, preset_names
from megatron_lynx.spec import Batch, Model, Parallel

SMALL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def small(**fields: Any) -> Model:
    return Model(**{**SMALL, **fields})


@pytest.mark.parametrize("name", preset_names("models"))
def test_every_preset_is_a_model(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.head_size * model.num_attention_heads == model.hidden_size


def test_the_named_shapes_are_those_of_the_notes() -> None:
    shapes = {
        "gpt-1.3b": (24, 2048, 16),
        "gpt-2.7b": (32, 2560, 32),
        "gpt-4.7b": (24, 4096, 32),
        "gpt-7b": (32, 4096, 32),
        "gpt-13b": (40, 5120, 40),
        "gpt-20b": (44, 6144, 48),
        "gpt-23b": (50, 6144, 48),
    }
    for name, shape in shapes.items():
        model = load_model(name)
        assert (model.num_layers, model.hidden_size, model.num_attention_heads) == shape


def test_derived_sizes() -> None:
    assert small().ffn == 2048
    assert small(swiglu=True).ffn == 1344  # int(2048 * 2 / 3 / 64) * 64, as Megatron rounds
    assert small(ffn_hidden_size=100).ffn == 100
    assert small(num_query_groups=2).groups == 2
    assert small(kv_channels=48).head_size == 48


@pytest.mark.parametrize(
    ("fields", "flag", "works"),
    [
        ({"num_layers": 0}, "--num-layers 0", "at least 1"),
        ({"hidden_size": 510}, "--hidden-size 510", "--hidden-size 512"),
        ({"num_query_groups": 3}, "--num-attention-heads 8", "--num-attention-heads 9"),
        ({"attention_dropout": 1.0}, "--attention-dropout 1.0", "--attention-dropout 0.1"),
        ({"hidden_dropout": -0.1}, "--hidden-dropout -0.1", "--hidden-dropout 0.1"),
        ({"vocab_size": True}, "--vocab-size True", "at least 1"),
    ],
)
def test_a_wrong_model_is_refused(fields: dict[str, Any], flag: str, works: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(flag)}.*{re.escape(works)}"):
        small(**fields)


@pytest.mark.parametrize(
    ("model", "parallel", "batch", "message"),
    [
        ({}, {"tp": 3}, {}, "--num-attention-heads 8 is not divisible by --tp 3"),
        ({"num_query_groups": 2}, {"tp": 4}, {}, "--num-query-groups 2 .*--tp 2 works"),
        ({"ffn_hidden_size": 1001}, {"tp": 2}, {}, "--ffn-hidden-size 1001"),
        ({}, {"tp": 2, "sequence_parallel": True}, {"seq_length": 127}, "--seq-length 127"),
        ({}, {"pp": 16}, {}, "--num-layers 8 is fewer than the 16 stages"),
        ({}, {"dp": 3}, {}, "--global-batch-size 16 .* --global-batch-size 18 works"),
    ],
)
def test_a_wrong_job_is_refused(
    model: dict[str, Any], parallel: dict[str, Any], batch: dict[str, Any], message: str
) -> None:
    sizes = {"seq_length": 128, "micro_batch_size": 1, "global_batch_size": 16, **batch}
    with pytest.raises(ConfigError, match=message):
        check_job(small(**model), Parallel(**parallel), Batch(**sizes))


@pytest.mark.parametrize(
    "parallel",
    [{"tp": 0}, {"vpp": 2}, {"sequence_parallel": True}, {"pp": 4, "microbatch_group_size": 2}],
)
def test_wrong_parallel_sizes_are_refused(parallel: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"works|at least 1"):
        Parallel(**parallel)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_microbatches_fill_the_global_batch(dp: int, micro: int, count: int) -> None:
    batch = Batch(seq_length=8, micro_batch_size=micro, global_batch_size=dp * micro * count)
    assert batch.num_microbatches(dp) == count


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**SMALL, "layers": 3}, "'layers' is not a field"),
        ({k: v for k, v in SMALL.items() if k != "hidden_size"}, "--hidden-size is missing"),
        ({**SMALL, "hidden_size": "512"}, "hidden_size '512' is not a whole number"),
        ({**SMALL, "swiglu": 1}, "swiglu 1 is not true or false"),
        ({**SMALL, "hidden_dropout": "no"}, "hidden_dropout 'no' is not a number"),
        ({**SMALL, "normalization": "BatchNorm"}, "LayerNorm or RMSNorm works"),
    ],
)
def test_a_model_file_is_checked_field_by_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model(values, "--model my.toml")
