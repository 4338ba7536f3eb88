"""The bound of ``opt`` against brute force: never above the best plan, also where layers are summed up."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from megatron_lynx.cost import LayerCosts
from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.planner import SolveOptions, StageProblem
from megatron_lynx.planner import bound as bounds
from megatron_lynx.planner.bound import BoundModel, fillings
from megatron_lynx.schedule import Turn
from tests.support import brute_force
from tests.support.strategies import stage_problems


@pytest.mark.parametrize("soft", [False, True])
def test_no_plan_is_below_the_bound(soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one layer apart, the two others of three are summed up."""
    monkeypatch.setattr(bounds, "APART", 1)

    @settings(
        max_examples=200,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(stage_problems(most_regions=6, most_layers=3, most_plans=80, soft=soft))
    def holds(problem: StageProblem) -> None:
        options = SolveOptions(soft=soft)
        best = brute_force.best(problem, soft)
        for budget in (True, False):
            model = BoundModel(problem, options, budget=budget)
            found = model.solve(time.monotonic() + 20)
            if not budget:
                assert found.bound * model.scale.unit <= best.lowest_bytes + 1e-6
            elif best.exposed_ns is not None:
                assert found.bound * 1000 <= best.exposed_ns + 0.5
                event("met" if found.bound * 1000 >= best.exposed_ns - 1 else "below")

    holds()


def _short_windows(room: int, in_flight: int, share: float) -> StageProblem:
    """Three layers of two regions whose windows are shorter than what is to be rebuilt."""
    graph = LayerGraph(
        regions=(
            Region(name=INPUT),
            Region(name="short", reads=("input",)),
            Region(name="long", reads=("short.out",)),
            Region(name="sum", reads=("long.out",), communicates=True),
        ),
        storages=(
            Storage(name="input", producer=INPUT, size_bytes=5, saved_by=("short",)),
            Storage(name="short.out", producer="short", size_bytes=20, saved_by=("long",)),
            Storage(name="long.out", producer="long", size_bytes=40, saved_by=("sum",)),
        ),
    )
    times = {"short": 10, "long": 30, "sum": 20}
    problem = StageProblem(
        stage=0,
        chunks=((0, 1, 2),),
        graph=graph,
        costs=LayerCosts(forward_ns=times, dgrad_ns=times, wgrad_ns={}, collective_ns={"fwd:sum": room}),
        turns=(Turn(moments=((in_flight,),)),),
        budget_bytes=0,
        forward_slots=("sum",),
    )
    return replace(problem, budget_bytes=round(share * graph.kept_bytes() * problem.most_layers()))


@pytest.mark.parametrize("room", [4, 10, 25])
@pytest.mark.parametrize("in_flight", [5])
def test_the_bound_of_overrun_windows(room: int, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "APART", 1)
    overrun = 0
    for share in (0.4, 0.6, 0.8):
        problem = _short_windows(room, in_flight, share)
        for soft in (False, True):
            best = brute_force.best(problem, soft)
            found = BoundModel(problem, SolveOptions(soft=soft), budget=True).solve(time.monotonic() + 20)
            if best.exposed_ns is None:
                continue
            assert found.bound * 1000 <= best.exposed_ns + 0.5
            assert found.bound * 1000 >= 0.7 * best.exposed_ns - 0.5
            overrun += soft and best.exposed_ns > 0
    assert overrun


def _by_hand(times: list[int], room: int, most: int) -> set[tuple[int, ...]]:
    """All fillings that no further region fits into."""
    every = [()]
    for _ in times:
        every = [(*one, n) for one in every for n in range(most + 1)]
    load = {one: sum(n * t for n, t in zip(one, times, strict=True)) for one in every}
    return {
        one
        for one in every
        if load[one] <= room
        and all(load[one] + t > room for n, t in zip(one, times, strict=True) if n < most)
    }


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True), st.integers(1, 12), st.integers(1, 3)
)
def test_fillings_are_all_the_full_ones(times: list[int], room: int, most: int) -> None:
    hard = list(fillings(times, room, most, soft=False))
    assert {filling for filling, _ in hard} == _by_hand(times, room, most)
    assert all(over == 0 for _, over in hard)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True), st.integers(1, 12), st.integers(1, 3)
)
def test_what_overruns_a_window_does_so_by_one_region(times: list[int], room: int, most: int) -> None:
    for filling, over in fillings(times, room, most, soft=True):
        load = sum(n * t for n, t in zip(filling, times, strict=True))
        assert over == max(0, load - room)
        if over:
            used = [t for n, t in zip(filling, times, strict=True) if n]
            assert any(load - t < room for t in used)
