"""Single layers: keywords, orders, groups, and what a tape refuses."""

from __future__ import annotations

import pytest

from tests.megatron_cpu.lynx_ranks import Case
from tests.megatron_cpu.test_bitwise import check_outcomes
from tests.support.launch import run_ranks

MODULE = "tests.megatron_cpu.layer_ranks"


def test_inputs_by_keyword_get_the_same_gradients_as_by_position() -> None:
    assert run_ranks(1, f"{MODULE}:keyword_gradients", {"rope": True}) == [[]]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_any_order_of_replays_and_backwards(sequence_parallel: bool) -> None:
    """With tensor parallelism both ranks draw the same orders, as collectives demand."""
    world_size = 2 if sequence_parallel else 1
    model = {"tp": 2, "keep_gradients": False} if sequence_parallel else {}
    assert run_ranks(world_size, f"{MODULE}:any_order", model) == [[]] * world_size


def test_process_groups_come_from_the_layers() -> None:
    assert run_ranks(2, f"{MODULE}:groups_come_from_layers", {"tp": 2}) == [[], []]


def test_a_second_backward_of_a_retained_graph() -> None:
    assert run_ranks(1, f"{MODULE}:second_backward", {}) == [[]]


@pytest.mark.parametrize("plan", ["full", "windows"])
def test_passes_that_no_schedule_has(plan: str) -> None:
    assert run_ranks(1, f"{MODULE}:odd_passes", plan) == [[]]


def test_what_a_layer_keeps_beyond_its_description_is_found() -> None:
    ((known, unknown, described, planned),) = run_ranks(1, f"{MODULE}:kept_otherwise", {})
    assert known == {}
    # Its input and its output are described; the function keeps its two factors beside them.
    assert unknown == {"activation": 2 * described["activation"]}
    assert planned == {**described, **unknown}


def test_hooks_and_ranges_see_no_replay() -> None:
    """A user's module hooks see what they see without recomputation, and profiler ranges close."""
    (found,) = run_ranks(1, "tests.megatron_cpu.lynx_ranks:seen_by_hooks", "full")
    assert found["lynx"] == found["stock"]
    assert len(found["stock"]) > 100
    assert found["ranges left open"] == []


def test_fused_gradient_accumulation_beside_an_overlapped_reduction() -> None:
    """Linears mark their weight, DDP looks for the mark on the Parameter (data-parallel size 2)."""
    plans = ["none", "full", "windows", {0: {"activation": "demand"}}]
    asked = [Case({"fusion": True}, plans), Case({"fusion": True, "bf16": True}, plans[:2])]
    results = run_ranks(2, "tests.megatron_cpu.lynx_ranks:compare_with_fusion", asked)
    check_outcomes(asked, results)


@pytest.mark.parametrize(
    ("where", "kept"),
    [("mlp.linear_fc1", {"linear_fc1"}), ("mlp", {"activation"}), ("self_attention", {"qkv_split"})],
)
def test_what_no_kind_describes_is_kept_and_the_rest_goes_on(where: str, kept: set[str]) -> None:
    ((different, again, microbatches),) = run_ranks(1, f"{MODULE}:strangers", where)
    assert not different
    assert microbatches == 4
    assert not kept & set(again)
    assert {"input_layernorm", "core_attention"} <= set(again)
