"""OPT against brute force, and the order among planners, on random stages; no tolerance."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.planner import PLANNERS, SolveOptions, StageProblem, plan
from tests.support import brute_force
from tests.support.strategies import stage_problems

EXAMPLES = settings(
    max_examples=500,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # to shrink a stage takes longer than to find it
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FEW = settings(EXAMPLES, max_examples=60)


def exposed(problem: StageProblem, planner: str, options: SolveOptions | None = None) -> float:
    """Exposed time; infinite where nothing fits."""
    try:
        return plan(problem, planner, options).report.exposed_ns
    except InfeasibleError:
        return float("inf")


@EXAMPLES
@given(stage_problems())
def test_opt_equals_brute_force(problem: StageProblem) -> None:
    best = brute_force.best(problem)
    if best.exposed_ns is None:
        with pytest.raises(InfeasibleError) as caught:
            plan(problem, "opt")
        assert caught.value.needed_bytes == best.lowest_bytes
        assert caught.value.stage == problem.stage
        return
    found = plan(problem, "opt").report
    assert found.exposed_ns == best.exposed_ns
    assert found.status == "optimal"
    assert found.gap == 0.0
    assert found.peak_bytes <= problem.budget_bytes


@EXAMPLES
@given(stage_problems(most_regions=6, soft=True))
def test_opt_equals_brute_force_where_windows_may_be_overrun(problem: StageProblem) -> None:
    best, options = brute_force.best(problem, soft=True), SolveOptions(soft=True)
    found = exposed(problem, "opt", options)
    if best.exposed_ns is None:
        assert found == float("inf")
        return
    # Each window's excess is rounded up to a nanosecond after the solver has chosen.
    rounding = (
        0
        if problem.costs.contention == 1.0
        else sum(len(problem.windows(chunk)) for chunk in range(len(problem.chunks)))
    )
    assert best.exposed_ns <= found <= best.exposed_ns + rounding
    assert found <= exposed(problem, "opt")


@FEW
@given(stage_problems(most_layers=3, most_plans=10**9))
def test_better_planners_are_never_worse(problem: StageProblem) -> None:
    names = ("opt", "mixed", "heu", "full-uniform-1")
    opt, mixed, heu, full = (exposed(problem, name) for name in names)
    assert opt <= mixed <= heu <= full
    for name in PLANNERS:
        if name not in ("selective", "full-uniform"):
            assert opt <= exposed(problem, name), name
    assert opt <= exposed(problem, "checkmate") <= exposed(problem, "tail-free")


@FEW
@given(stage_problems(most_layers=3, most_plans=10**9))
def test_more_budget_never_costs_more(problem: StageProblem) -> None:
    budgets = [problem.budget_bytes + more for more in (0, 1, 20, 100)]
    for name in ("opt", "heu", "windows", "checkmate", "full-block", "full-uniform"):
        times = [exposed(replace(problem, budget_bytes=b), name) for b in budgets]
        assert times == sorted(times, reverse=True), name


@FEW
@given(stage_problems(most_layers=3, most_plans=10**9))
def test_a_window_more_never_costs_more(problem: StageProblem) -> None:
    closed = {"forward": False, "backward": False, "stall": False, "head": False}
    for name in ("opt", "heu"):
        for kind in closed:
            fewer = exposed(problem, name, SolveOptions(**{**closed, kind: True}))
            assert exposed(problem, name) <= fewer <= exposed(problem, name, SolveOptions(**closed))
    assert exposed(problem, "opt", SolveOptions(soft=True)) <= exposed(problem, "opt")


@FEW
@given(stage_problems(most_layers=3, most_plans=10**9))
def test_the_smallest_budget_is_exact(problem: StageProblem) -> None:
    for name in (n for n in PLANNERS if n != "selective"):
        with pytest.raises(InfeasibleError) as caught:
            plan(replace(problem, budget_bytes=0), name)
        least = caught.value.needed_bytes
        assert plan(replace(problem, budget_bytes=least), name).report.peak_bytes == least
        with pytest.raises(InfeasibleError):
            plan(replace(problem, budget_bytes=least - 1), name)
