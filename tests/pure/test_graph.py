"""LayerGraph: what is kept, what reappears, and the formulas of arXiv 2205.05198."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.layers.local import FORWARD_ORDER, backward_slots, forward_slots, layer_graph
from megatron_lynx.spec import Batch, Model, Parallel
from tests.support.toy import toy_graph

STATS_AND_MASK = ("stats", "causal_mask", "attention_mask", "logsumexp")
"""Storages that the paper leaves out: norm statistics, the causal mask, flash attention's sums."""


def gpt(**fields: Any) -> Model:
    sizes = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1024}
    return Model(**{**sizes, "transformer_impl": "local", **fields})


BATCH = Batch(seq_length=64, micro_batch_size=2, global_batch_size=2)
SBH = 64 * 2 * 256


def table_2_bytes(graph: LayerGraph) -> int:
    """What the paper counts of a layer."""
    skipped = sum(s.size_bytes for s in graph.storages if s.name.endswith(STATS_AND_MASK) and s.saved_by)
    return graph.kept_bytes() - skipped


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_table_2_with_attention_kept(tp: int, sequence_parallel: bool) -> None:
    """sbh(10 + 24/t + 5as/ht) with tensor parallelism, sbh/t(34 + 5as/h) with sequence parallelism."""
    if sequence_parallel and tp == 1:
        tp = 2
    parallel = Parallel(tp=tp, sequence_parallel=sequence_parallel)
    graph = layer_graph(gpt(attention="unfused"), parallel, BATCH)
    scores = 5 * 8 * 64 * SBH // 256
    expected = (34 * SBH + scores) // tp if sequence_parallel else 10 * SBH + 24 * SBH // tp + scores // tp
    assert table_2_bytes(graph) == expected


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_table_2_without_scores(tp: int) -> None:
    """Flash attention keeps what selective recomputation keeps: sbh(10 + 24/t)."""
    graph = layer_graph(gpt(), Parallel(tp=tp), BATCH)
    assert table_2_bytes(graph) == 10 * SBH + 24 * SBH // tp


def test_full_recomputation_keeps_the_input_alone() -> None:
    graph = layer_graph(gpt(), Parallel(tp=2), BATCH)
    assert graph.kept_bytes(name for name in graph.names if name != INPUT) == 2 * SBH


def test_regions_are_in_forward_order_and_slots_are_regions() -> None:
    for parallel in (Parallel(), Parallel(tp=2), Parallel(tp=2, sequence_parallel=True)):
        graph = layer_graph(gpt(), parallel, BATCH)
        assert graph.names == tuple(name for name in FORWARD_ORDER if name != "output_gate")
        talking = {region.name for region in graph.regions if region.communicates} - {INPUT}
        assert talking == set(forward_slots(parallel))
        assert {slot.partition(".")[0] for slot in backward_slots(parallel)} <= set(graph.names)


def test_without_dropout_there_are_no_masks() -> None:
    graph = layer_graph(gpt(hidden_dropout=0.0), Parallel(), BATCH)
    assert not [name for name in graph.names if name.endswith("_dropout")]
    assert not [storage.name for storage in graph.storages if storage.name.endswith("mask")]


@given(st.sets(st.sampled_from(toy_graph().names)))
def test_a_storage_is_kept_or_rebuilt_or_needed_by_nobody(dropped: set[str]) -> None:
    graph, gone = toy_graph(), frozenset(dropped)
    for storage in graph.storages:
        needed = bool(storage.saved_by) or any(r in gone for r in graph.readers(storage.name))
        assert graph.is_kept(storage, gone) == (needed and storage.producer not in gone)
    rebuilt = sum(graph.rebuilt_bytes(region, gone) for region in gone)
    needed_bytes = sum(
        s.size_bytes for s in graph.storages if s.saved_by or any(r in gone for r in graph.readers(s.name))
    )
    assert graph.kept_bytes(gone) + rebuilt == needed_bytes


def test_dropping_a_reader_keeps_what_it_reads() -> None:
    graph = toy_graph()
    assert not graph.is_kept(graph.storage("gemm.out"), frozenset())
    assert graph.is_kept(graph.storage("gemm.out"), frozenset({"attn"}))
    assert graph.inputs_of("add") == (INPUT, "proj")
    assert graph.inputs_of("mask") == ()
    assert INPUT not in graph.droppable()
    with pytest.raises(KeyError):
        graph.region("nothing")
    with pytest.raises(KeyError):
        graph.storage("nothing")


@pytest.mark.parametrize(
    ("regions", "storages"),
    [
        ((Region(name="a"), Region(name="a")), ()),
        ((Region(name="a"),), (Storage(name="x", producer="b", size_bytes=1),)),
        ((Region(name="a"),), (Storage(name="x", producer="a", size_bytes=1, saved_by=("b",)),)),
        ((Region(name="a", reads=("x",)),), (Storage(name="x", producer="a", size_bytes=1),)),
        ((Region(name="a", reads=("y",)),), ()),
    ],
)
def test_a_graph_that_cannot_be_is_refused(
    regions: tuple[Region, ...], storages: tuple[Storage, ...]
) -> None:
    with pytest.raises(ValueError):
        LayerGraph(regions=regions, storages=storages)


def test_cuts_are_regions_in_backward_order() -> None:
    regions = (Region(name="a"), Region(name="b"))
    LayerGraph(regions=regions, storages=(), cuts=("b", "a"))
    for cuts in (("a", "b"), ("a", "a"), ("c",)):
        with pytest.raises(ValueError):
            LayerGraph(regions=regions, storages=(), cuts=cuts)


def test_phases_of_a_layers_backward() -> None:
    graph = layer_graph(gpt(), Parallel(tp=2), BATCH)
    phases = [graph.phase_of(name) for name in reversed(graph.names)]
    assert phases == sorted(phases)
    at = ("activation", "linear_fc1", "qkv_split", "linear_qkv")
    assert [graph.phase_of(name) for name in at] == [0, 1, 1, 2]
    # The MLP's own are gone when attention's backward begins, attention's when that of the QKV linear does.
    released = {s.name: graph.release_phase(s.name) for s in graph.storages}
    assert released["activation.out"] == released["mlp_dropout.mask"] == 0
    assert released["pre_mlp_layernorm.out"] == released["core_attention.out"] == 1
    assert released["input"] == released["input_layernorm.out"] == 2
    # linear_proj's output, which no backward reads, may be wanted until self_attn_bda has run again.
    assert graph.first_need("linear_proj") is None
    assert graph.latest_phase("linear_proj") == graph.latest_phase("self_attn_bda") == 1
    assert graph.latest_phase("mlp_bda") == 0


def test_the_fingerprint_follows_sizes() -> None:
    one = layer_graph(gpt(), Parallel(), BATCH).fingerprint()
    assert one == layer_graph(gpt(num_layers=8, name="other"), Parallel(), BATCH).fingerprint()
    assert one != layer_graph(gpt(), Parallel(tp=2), BATCH).fingerprint()


@given(st.dictionaries(st.sampled_from(FORWARD_ORDER), st.integers(0, 10**9)))
def test_a_graph_with_measured_sizes_keeps_what_was_measured(kept: dict[str, int]) -> None:
    graph = layer_graph(gpt(), Parallel(tp=2), BATCH)

    def by_region(one: LayerGraph) -> dict[str, int]:
        saved = [s for s in one.storages if s.saved_by]
        return {name: sum(s.size_bytes for s in saved if s.producer == name) for name in one.names}

    known = {name: size for name, size in kept.items() if name in graph.names}
    assert by_region(graph.keeping(kept)) == {**by_region(graph), **known}
    assert [s for s in graph.keeping(kept).storages if not s.saved_by] == [
        s for s in graph.storages if not s.saved_by
    ]
