"""Single layers: keywords, orders, groups, and what a tape refuses."""

from __future__ import annotations

import pytest

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
