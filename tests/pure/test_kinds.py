"""Kinds of layers: one that the package has never seen is planned and simulated from its file alone."""

from __future__ import annotations

from typing import cast

import pytest

from megatron_lynx import layers
from megatron_lynx.job import Job, make_job
from megatron_lynx.layers.kind import LayerKind
from megatron_lynx.presets import load_cluster
from megatron_lynx.search.workflow import plan_job
from megatron_lynx.spec import Batch, Model, Parallel
from megatron_lynx.units import GIB
from tests.support.kinds.toy import KIND

SHAPE = Model(
    num_layers=16, hidden_size=4096, num_attention_heads=32, vocab_size=32000, transformer_impl=KIND.name
)


def job(memory_bytes: int) -> Job:
    """Toy layers on a slow link, so that windows are worth something."""
    return make_job(
        SHAPE,
        Parallel(tp=2, pp=2),
        Batch(seq_length=2048, micro_batch_size=8, global_batch_size=64),
        cluster=load_cluster("a100-40g-pcie"),
        memory_bytes=memory_bytes,
    )


def test_a_kind_that_only_the_tests_have_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(dict[str, LayerKind], layers.KINDS), KIND.name, KIND)
    peaks = {
        name: max(stage.peak_bytes for stage in plan_job(job(36 * GIB), name).row().stages)
        for name in ("none", "full-uniform-1")
    }
    tight = job(sum(peaks.values()) // 2)
    times = {name: plan_job(tight, name) for name in ("opt", "heu", "checkmate", "full-uniform-1")}
    for planned in times.values():
        assert max(stage.peak_bytes for stage in planned.row().stages) <= tight.memory_bytes
        assert planned.timeline().makespan_ns == planned.simulated_ns
    steps = {name: planned.simulated_ns for name, planned in times.items()}
    assert steps["opt"] <= steps["heu"] <= steps["checkmate"] <= steps["full-uniform-1"]
    assert steps["opt"] < steps["full-uniform-1"]
    dropped = {region for stage in times["opt"].plan.stages for one in stage.layers for region in one.dropped}
    assert dropped
    assert dropped <= {*KIND.names}
