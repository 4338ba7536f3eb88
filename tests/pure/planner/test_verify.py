"""The referee finds a fault of each kind, says where, and agrees with the planners' own account."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from megatron_lynx.errors import ConfigError, InfeasibleError
from megatron_lynx.plan import LayerPlan, StagePlan, Window, parse_choice
from megatron_lynx.planner import PLANNERS, SolveOptions, StageProblem, plan, verify
from megatron_lynx.planner.price import Pricer
from megatron_lynx.planner.verify import timeline, walk
from megatron_lynx.schedule import Turn
from tests.support.strategies import stage_problems
from tests.support.toy import toy_problem, with_budget


def planned(problem: StageProblem, *layers: str) -> StagePlan:
    """A stage plan from texts such as ``norm=fwd:0:proj attn=demand``, one a layer."""
    parsed = []
    for index, text in zip(problem.layers, layers, strict=True):
        pairs = [word.split("=") for word in text.split()]
        parsed.append(LayerPlan(layer=index, choices=tuple((n, parse_choice(c)) for n, c in pairs)))
    return StagePlan(stage=problem.stage, chunks=problem.chunks, layers=tuple(parsed))


def kinds(problem: StageProblem, *layers: str) -> list[str]:
    """The kinds of fault in a plan."""
    return [v.kind for v in verify(problem, planned(problem, *layers))]


def test_sound_plans_have_no_faults() -> None:
    problem = toy_problem()
    assert kinds(problem, "", "") == []
    assert kinds(problem, "norm=bwd:1:mlp mask=fwd:1:proj", "gemm=demand attn=demand") == []
    assert kinds(problem, "norm=bwd:0:mlp", "norm=fwd:0:mlp attn=fwd:1:mlp") == []


@pytest.mark.parametrize(
    ("layer0", "layer1", "kind", "point", "over"),
    [
        ("oops=demand", "", "unknown", "demand", 0),
        ("norm=fwd:7:proj", "", "unknown", "fwd:7:proj", 0),
        ("norm=stall", "", "unknown", "stall", 0),
        ("attn=demand norm=demand", "", "order", "plan", 0),
        ("norm=keep", "", "order", "plan", 0),
        ("attn=demand add=demand proj=fwd:1:mlp", "", "order", "plan", 0),
        ("proj=fwd:1:mlp add=demand", "", "communicates", "fwd:1:mlp", 0),
        ("", "norm=bwd:0:mlp", "late", "bwd:0:mlp", 0),
        ("add=bwd:0:mlp", "", "late", "bwd:0:mlp", 0),
        ("norm=fwd:1:mlp gemm=demand attn=fwd:1:proj", "", "not-ready", "fwd:1:proj", 0),
        ("norm=bwd:1:mlp attn=fwd:0:mlp", "", "", "", 0),
        ("gemm=bwd:0:gemm attn=demand", "", "not-ready", "backward 0", 0),
        ("norm=fwd:0:proj attn=fwd:0:proj", "", "overfull", "fwd:0:proj", 5),
        ("gemm=bwd:1:mlp attn=demand", "", "overfull", "bwd:1:mlp", 20),
        ("input=demand", "", "input", "backward 0", 0),
        ("", "input=demand", "input", "backward 1", 0),
    ],
)
def test_planted_faults(layer0: str, layer1: str, kind: str, point: str, over: int) -> None:
    problem = toy_problem()
    stage = planned(problem, layer0, layer1)
    found = [(v.kind, v.point, v.over) for v in verify(problem, stage)]
    if not kind:
        assert found == []
        return
    assert (kind, point, over) in found
    assert f"<-- {kind} at {point}" in timeline(problem, stage, walk(problem, stage))


def test_another_stage_is_refused() -> None:
    problem = toy_problem()
    stage = planned(problem, "", "")
    assert [v.kind for v in verify(replace(problem, stage=1), stage)] == ["layers"]
    turns = (Turn(moments=((1, 1),)),) * 2
    assert [v.kind for v in verify(replace(problem, chunks=((0,), (1,)), turns=turns), stage)] == ["layers"]


def test_soft_windows_may_be_overrun_at_a_price() -> None:
    problem = toy_problem()
    stage = planned(problem, "norm=fwd:0:proj attn=fwd:0:proj", "")
    result = walk(problem, stage, soft=True)
    assert result.violations == []
    assert result.exposed_ns == 5


def test_a_window_that_is_next_to_nothing_is_none() -> None:
    """A toy layer takes 480 ns and its waits: half a percent of it is between 2 and 3 ns."""
    window = Window("fwd", 0, "proj")
    assert toy_problem(collective_ns=2).capacity_ns(window) == 0
    assert toy_problem(collective_ns=3).capacity_ns(window) == 3
    stage = planned(toy_problem(collective_ns=2), "norm=fwd:0:proj", "")
    assert [v.over for v in verify(toy_problem(collective_ns=2), stage)] == [10]


def test_what_overruns_a_window_goes_on_at_full_speed() -> None:
    problem = toy_problem()
    problem = replace(problem, costs=replace(problem.costs, contention=1.5))
    stage = planned(problem, "norm=fwd:0:proj attn=fwd:0:proj", "")
    # 15 + 38 of 30 ns: 23 are left, which took 1.5 times as long only beside the collective
    assert walk(problem, stage, soft=True).exposed_ns == 16
    assert Pricer(problem).price(stage).exposed_ns == 16
    assert Pricer(problem).price(stage).hidden_ns == 30


def test_memory_goes_phase_by_phase() -> None:
    problem = toy_problem(in_flight=3)
    graph = replace(problem.graph, cuts=("proj", "norm"))
    problem = replace(problem, graph=graph, workspace_bytes=(20, 7, 1))
    whole = graph.kept_bytes()
    alive = {s.point: s.alive_bytes for s in walk(problem, planned(problem, "", "")).steps}
    assert alive["backward 1"] == 6 * whole + 20
    assert alive["backward 1 proj"] == 6 * whole - 10 - 5 + 7  # add.out and mask.out are gone
    assert alive["backward 1 norm"] == 6 * whole - 15 - 40 - 10 - 10 + 1  # attention's, and norm.out
    assert alive["backward 0"] == 5 * whole + 20
    again = {
        s.point: s.alive_bytes for s in walk(problem, planned(problem, "", "gemm=demand attn=demand")).steps
    }
    kept = 6 * whole - 3 * 50
    assert again["backward 1"] == kept + 20  # nothing before the cut needs attention
    assert again["backward 1 proj"] == kept - 15 + 50 + 30 + 7


def test_memory_is_counted_at_every_point() -> None:
    problem = toy_problem(in_flight=3)
    whole = problem.graph.kept_bytes()
    assert whole == 10 + 10 + 40 + 10 + 5 + 10
    alive = {s.point: s.alive_bytes for s in walk(problem, planned(problem, "", "")).steps}
    assert alive["forward"] == 3 * 2 * whole
    assert alive["backward 1"] == 3 * 2 * whole + 20
    assert alive["backward 0"] == 3 * 2 * whole - whole + 20
    # attention dropped in layer 0: its input (gemm.out, 30) is held instead, unless gemm is dropped too
    held = {s.point: s.alive_bytes for s in walk(problem, planned(problem, "attn=fwd:1:proj", "")).steps}
    assert held["fwd:0:mlp"] == 3 * (2 * whole - 50 + 30)
    assert held["fwd:1:proj"] == 3 * (2 * whole - 50 + 30) + 50
    again = {
        s.point: s.alive_bytes for s in walk(problem, planned(problem, "gemm=demand attn=demand", "")).steps
    }
    assert again["backward 1"] == 3 * (2 * whole - 50) + 20
    assert again["backward 0"] == 3 * (2 * whole - 50) - whole + 50 + 30 + 20


def test_one_byte_too_many_is_found_at_its_point() -> None:
    problem = toy_problem()
    peak = plan(problem, "none").report.peak_bytes
    stage = planned(problem, "", "")
    assert verify(with_budget(problem, peak), stage) == ()
    (fault,) = verify(with_budget(problem, peak - 1), stage)
    assert (fault.kind, fault.point, fault.over) == ("memory", "backward 1", 1)


def test_full_recomputation_costs_a_whole_forward() -> None:
    problem = toy_problem(layers=4)
    forward = problem.costs.layer_forward_ns
    again = sum(problem.costs.forward_ns.values()) + 30 + 30  # proj and mlp wait again
    assert forward == again
    for name, layers in (
        ("full-uniform-1", 4),
        ("full-uniform-2", 4),
        ("full-block-3", 3),
        ("full-block-0", 0),
    ):
        report = plan(problem, name).report
        assert report.exposed_ns == layers * forward
        assert report.planner == name
    tail = plan(problem, "tail-free").report.exposed_ns
    assert tail == 4 * (forward - 100 - 30)
    kept = [plan(problem, f"full-uniform-{g}").report.kept_bytes for g in (1, 2, 3, 4)]
    assert kept == [3 * 10 * inputs for inputs in (4, 2, 2, 1)]


def test_the_best_numbers_are_the_smallest_that_fit() -> None:
    problem = toy_problem(layers=4)
    loose = plan(problem, "full-block-2").report.peak_bytes
    assert plan(with_budget(problem, loose), "full-block").report.planner == "full-block-2"
    problem = toy_problem(layers=4, in_flight=20)
    tight = plan(problem, "full-uniform-2").report.peak_bytes
    assert plan(with_budget(problem, tight), "full-uniform").report.planner == "full-uniform-2"


@pytest.mark.parametrize("name", ["full-uniform-0", "lynx", "full-block-", "selective"])
def test_unknown_planners_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        plan(toy_problem(), name)


@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(stage_problems(most_layers=3, most_plans=10**9))
def test_two_accounts_of_every_plan_agree(problem: StageProblem) -> None:
    for name in (n for n in PLANNERS if n != "selective"):
        for soft in (False, True):
            try:
                found = plan(problem, name, SolveOptions(soft=soft, time_limit_s=5))
            except InfeasibleError:
                continue
            result = walk(problem, found.plan, graph=found.graph, soft=soft)
            assert result.violations == []
            assert result.exposed_ns == found.report.exposed_ns
            assert max(s.alive_bytes for s in result.steps) == found.report.peak_bytes <= problem.budget_bytes
