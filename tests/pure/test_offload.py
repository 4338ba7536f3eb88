"""Megatron's offloading as a row: bytes counted by hand, bounds that it cannot pass, the flags it prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_lynx.cli.report import compare_table, launch_flags, verdict
from megatron_lynx.errors import InfeasibleError
from megatron_lynx.hardware import read_cluster
from megatron_lynx.job import Job, make_job
from megatron_lynx.layers import kind_of
from megatron_lynx.layers.dense import RECOMPUTE_MODULES
from megatron_lynx.presets import load_cluster, load_model, read_toml
from megatron_lynx.search import offload
from megatron_lynx.search.offload import (
    PARTS,
    Offload,
    best_offload,
    offload_flags,
    offloaded,
    planned_way,
    ways,
    why_not,
)
from megatron_lynx.search.stages import StagePlans
from megatron_lynx.search.workflow import (
    MEGATRON_METHODS,
    OFFLOAD,
    OPTIONS,
    Planned,
    best_of,
    compare,
    plan_job,
)
from megatron_lynx.simulator.memory import peak
from megatron_lynx.spec import Batch, Parallel
from megatron_lynx.units import GIB, MIB

ALL = ("qkv_linear", "core_attn", "attn_proj")


def job(
    *,
    pp: int = 2,
    layers: int = 4,
    micro: int = 4,
    memory: int | None = None,
    cluster: str = "a100-40g-pcie",
    bytes_per_second: int | None = None,
    **model: Any,
) -> Job:
    """A small GPT; ``bytes_per_second`` replaces the rate of the host's link."""
    place = load_cluster(cluster)
    if bytes_per_second is not None:
        place = replace(place, device=replace(place.device, host_bytes_per_second=bytes_per_second))
    return make_job(
        load_model("gpt-1.3b", num_layers=layers, vocab_size=8192, **model),
        Parallel(pp=pp),
        Batch(seq_length=2048, micro_batch_size=micro, global_batch_size=8 * micro),
        cluster=place,
        memory_bytes=memory,
    )


def planned(one: Job, way: Offload) -> Planned:
    """The job planned with a way to offload and memory without end."""
    roomy = replace(one, memory_bytes=1 << 50)
    return planned_way(StagePlans(roomy, OPTIONS, 1.0), way)


def freed(one: Job, *modules: str, parts: int = PARTS, recompute: str = "none") -> tuple[int, int]:
    """Bytes of a layer that are not kept, and that are copied, with ``modules`` offloaded."""
    other = offloaded(one, Offload(modules, parts, recompute))
    copied = {a - b for a, b in zip(other.workspace_bytes, one.workspace_bytes, strict=True)}
    assert len(copied) == 1
    return one.graph.kept_bytes() - other.graph.kept_bytes(), copied.pop()


def test_bytes_on_the_host_are_those_counted_by_hand() -> None:
    """Hidden size 2048, 16 heads, 4 x 2048 tokens, bf16: every tensor of a token's width has 32 MiB. With
    more than one sequence, flash attention saves copies of queries, keys, values and output, and the
    projection another output. Statistics and log-sums are below a million elements."""
    one, hidden = job(micro=4), 32 * MIB
    assert freed(one, "qkv_linear") == (2 * hidden, 2 * hidden)  # the norm's input and output
    assert freed(one, "core_attn") == (4 * hidden, 4 * hidden)
    assert freed(one, "core_attn", "attn_proj") == (5 * hidden, 5 * hidden)
    assert freed(one, *ALL) == (7 * hidden, 7 * hidden)
    assert freed(one, *ALL, parts=5) == (7 * hidden // 2, 7 * hidden // 2)


def test_what_a_part_on_the_device_saves_too_is_copied_and_not_freed() -> None:
    """With one sequence attention and the projection save one and the same output, 8 MiB: offloaded by one
    it stays, by both it goes, and is copied twice."""
    one, hidden = job(micro=1), 8 * MIB
    assert freed(one, "core_attn") == (3 * hidden, 4 * hidden)
    assert freed(one, "core_attn", "attn_proj") == (4 * hidden, 5 * hidden)


def test_what_is_run_again_is_not_copied_and_what_that_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kind's norms could be run again, their output would be made from the layer's input: neither is
    freed."""
    one, hidden = job(micro=4), 32 * MIB
    kind = replace(kind_of(one.model), recompute_modules=RECOMPUTE_MODULES)
    monkeypatch.setattr(offload, "kind_of", lambda model: kind)
    assert freed(one, "qkv_linear", recompute="modules-layernorm") == (0, hidden)


def test_small_tensors_stay() -> None:
    one = job(micro=1, hidden_size=256, num_attention_heads=4)
    assert freed(one, *ALL) == (0, 0)


def test_ways_are_those_that_megatron_accepts() -> None:
    found = dict(ways(job()))
    assert found["none"] == (
        ("qkv_linear",),
        ("core_attn",),
        ("qkv_linear", "core_attn"),
        ("core_attn", "attn_proj"),
        ALL,
    )
    assert found["selective"] == found["modules-core_attn+mlp"] == (("qkv_linear",),)
    assert found["modules-mlp"] == found["none"]
    assert len(found) == 2 ** len(kind_of(job().model).recompute_modules)


@pytest.mark.parametrize("parts", [3, PARTS])
def test_an_endless_link_costs_no_time_and_saves_memory(parts: int) -> None:
    one = job(bytes_per_second=1 << 60)
    none = plan_job(replace(one, memory_bytes=1 << 50), "none")
    other = planned(one, Offload(ALL, parts))
    assert other.iteration_ns == none.iteration_ns
    first, before = other.row().stages[0], none.row().stages[0]
    hosted, copied = freed(one, *ALL, parts=parts)
    assert before.kept_bytes - first.kept_bytes == 4 * hosted  # two layers, two microbatches in flight
    assert before.peak_bytes - first.peak_bytes == 4 * hosted - copied


def test_a_slow_link_is_what_a_step_takes() -> None:
    """One stage, 8 microbatches of 4 layers: each layer waits for its copies there and back."""
    rate = 10**7
    one = job(pp=1, bytes_per_second=rate)
    step = planned(one, Offload(ALL)).iteration_ns
    bound = 2 * 8 * 4 * freed(one, *ALL)[1] * 10**9 // rate
    assert bound <= step <= bound * 1.01
    half = planned(one, Offload(ALL, PARTS // 2)).iteration_ns
    assert bound / 2 <= half <= bound / 2 * 1.01


def test_no_way_is_faster_than_no_recomputation() -> None:
    one = job(bytes_per_second=10**10)
    none = plan_job(replace(one, memory_bytes=1 << 50), "none").iteration_ns
    for planner, sets in ways(one):
        for modules in sets:
            assert planned(one, Offload(modules, PARTS, planner)).iteration_ns >= none


TIGHT = job(layers=8, memory=7 * GIB)


def test_the_best_way_is_the_best_of_all() -> None:
    bench, steps = StagePlans(TIGHT, OPTIONS, 1.0), dict[str, int]()
    for planner, sets in ways(TIGHT):
        for way in (Offload(modules, n + 1, planner) for modules in sets for n in range(PARTS)):
            try:
                steps[str(way)] = planned_way(bench, way).iteration_ns
            except InfeasibleError:
                continue
    best = best_offload(bench)
    assert 0 < len(steps) < sum(len(sets) for _, sets in ways(TIGHT)) * PARTS
    assert best.iteration_ns == min(steps.values()) == steps[best.plan.planner]


def test_its_row_agrees_with_the_simulator() -> None:
    one = plan_job(TIGHT, OFFLOAD)
    timeline = one.timeline()
    assert timeline.makespan_ns == one.simulated_ns
    for row in one.row().stages:
        held = peak(timeline, row.stage)
        assert row.static_bytes + held.size_bytes <= row.peak_bytes <= TIGHT.memory_bytes


def test_it_counts_in_megatrons_best_with_its_flags() -> None:
    one = replace(TIGHT, memory_bytes=8 * GIB)
    rows = compare(one, MEGATRON_METHODS, partitioned=())
    row = next(row for row in rows if row.method == OFFLOAD)
    assert row.fits
    others = best_of(rows, MEGATRON_METHODS[:-1])
    assert others is not None
    assert (row.speedup_over(others) or 0) > 1
    assert best_of(rows, MEGATRON_METHODS) is row
    line = next(line for line in verdict(one, rows) if line.startswith("Megatron's best"))
    assert line.startswith(
        "Megatron's best: offload: --fine-grained-activation-offloading --offload-modules "
    )
    assert offload_flags(row.planner) == launch_flags(one, row)


def test_flags() -> None:
    start = "--fine-grained-activation-offloading --offload-modules"
    wait = "--fine-grained-offloading-max-inflight-offloads 1"
    assert offload_flags(str(Offload(("core_attn", "attn_proj"), 6))) == (
        f"{start} core_attn attn_proj --activation-offload-fraction 0.6 {wait}"
    )
    assert offload_flags(str(Offload(("qkv_linear",), PARTS, "modules-core_attn+mlp"))) == (
        f"{start} qkv_linear --activation-offload-fraction 1 {wait} "
        "--recompute-granularity selective --recompute-modules core_attn mlp"
    )
    assert offload_flags(str(Offload(("qkv_linear",), 5, "selective"))).endswith(
        "--recompute-modules core_attn"
    )
    assert offload_flags("modules-mlp") == ""


def test_a_row_without_figures_says_why() -> None:
    one = job(cluster="toy", micro=1)
    (row,) = compare(one, (OFFLOAD,), partitioned=())
    assert not row.fits
    assert row.needed_bytes is None
    assert row.reason == why_not(one)
    assert "host_gb_s = 25" in compare_table(one, [row], 80)
    data, name = read_toml("clusters", "toy")
    data["device"]["host_gb_s"] = 25
    assert read_cluster(data, name).device.host_bytes_per_second == 25 * 10**9
    local = job(transformer_impl="local")
    assert "--transformer-impl transformer_engine" in (why_not(local) or "")
    assert why_not(TIGHT) is None
