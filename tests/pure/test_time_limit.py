"""``--time-limit``: once it has passed, only what has no plan at all is planned. Counted, not timed."""

from __future__ import annotations

import time

import pytest

from megatron_lynx import planner as planners
from megatron_lynx.errors import InfeasibleError
from megatron_lynx.job import Job, make_job
from megatron_lynx.planner import PlannedStage, SolveOptions, StageProblem
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.workflow import METHODS, compare, plan_job
from megatron_lynx.spec import Batch, Parallel
from megatron_lynx.units import GIB

PP = 8


def job(memory_bytes: int) -> Job:
    """Eight stages that need recomputation with 8 GiB, and of which the even split does not fit with 7."""
    return make_job(
        load_model("gpt-1.3b", num_layers=24, vocab_size=8192),
        Parallel(tp=2, pp=PP),
        Batch(seq_length=2048, micro_batch_size=16, global_batch_size=16 * 16),
        cluster=load_cluster("a100-40g-pcie"),
        memory_bytes=memory_bytes,
    )


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The planners of the stages that were solved."""
    names, solve = list[str](), planners.plan

    def counting(problem: StageProblem, planner: str, options: SolveOptions) -> PlannedStage:
        names.append(planner)
        return solve(problem, planner, options)

    monkeypatch.setattr(planners, "plan", counting)
    return names


@pytest.mark.parametrize("partition", ["keep", "greedy", "search"])
def test_no_stage_is_planned_twice_once_time_is_over(solved: list[str], partition: str) -> None:
    planned = plan_job(job(8 * GIB), "opt", partition, deadline=time.monotonic() - 1)
    assert len(planned.stages) == PP
    assert any(layer.choices for stage in planned.plan.stages for layer in stage.layers)
    assert solved == ["heu"] * PP


def test_before_that_they_are(solved: list[str]) -> None:
    plan_job(job(8 * GIB), "opt")
    assert len(solved) > 4 * PP
    assert "opt" in solved


def test_a_search_that_time_ended_says_so(solved: list[str]) -> None:
    with pytest.raises(InfeasibleError, match="--time-limit ended the search") as caught:
        plan_job(job(7 * GIB), "opt", "search", deadline=time.monotonic() - 1)
    assert caught.value.needed_bytes > 7 * GIB
    assert len(solved) <= 2 * PP
    assert plan_job(job(7 * GIB), "heu", "search").plan.stages


def test_every_method_still_has_its_row(solved: list[str]) -> None:
    rows = compare(job(8 * GIB), METHODS, deadline=time.monotonic() - 1)
    assert len(rows) > len(METHODS)
    assert "opt" not in solved
    assert all(row.fits or row.reason for row in rows)
