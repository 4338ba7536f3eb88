"""What goes over the wire, and what stays in memory."""

from __future__ import annotations

from collections import Counter

from tests.megatron_cpu.lynx_ranks import Case
from tests.megatron_cpu.test_bitwise import NAMED, drawn_beginnings, drawn_plans
from tests.support.launch import run_ranks

TWO_RANKS = [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"pp": 2, "vpp": 2}]


def test_no_collective_more_than_without_recomputation() -> None:
    """A plan that keeps what lies behind collectives issues exactly the stock ones; full does not."""
    cases = [Case(model, ["quiet", "windows", "full"], steps=1) for model in TWO_RANKS]
    for found in run_ranks(2, "tests.megatron_cpu.lynx_ranks:count_collectives", cases):
        for case, counts in zip(cases, found, strict=True):
            assert sum(counts["stock"].values()) > 0
            assert counts["quiet"] == counts["stock"], case.model
            assert counts["windows"] == counts["stock"], case.model
            repeated = Counter(counts["full"])
            repeated.subtract(counts["stock"])
            assert (sum(repeated.values()) > 0) == (case.model.get("tp") == 2), case.model


def test_nothing_is_left_after_a_step() -> None:
    """Rebuilt storages and all that a tape made are gone after every step by reference count alone, and
    memory after twenty steps is what it was after two. (A link's thread may let go of a buffer late, so
    single counts may be higher.)"""
    named = [plan for plan in NAMED if isinstance(plan, str) and plan != "none"]
    cases = [
        Case(model, [*named, *drawn_plans(model, 1), *drawn_beginnings(1)], steps=20) for model in TWO_RANKS
    ]
    for found in run_ranks(2, "tests.megatron_cpu.lynx_ranks:leftovers", cases, timeout_s=570):
        assert len(found) == len(cases) * (len(named) + 2)
        for name, alive, live in found:
            assert alive == 0, (
                f"{name}: {alive} rebuilt storages are alive after a step (-1: none was rebuilt)"
            )
            assert min(live[1:5]) == min(live[5:]) > 0, f"{name}: live bytes after each step {live}"
