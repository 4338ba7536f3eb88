"""From a job to a plan: fits, beats what it must beat, agrees with the simulator, says why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_lynx
from megatron_lynx.cost import LayerCosts
from megatron_lynx.errors import ConfigError, InfeasibleError, PlanError
from megatron_lynx.job import Job, make_job
from megatron_lynx.layers import kind_of, layer_graph
from megatron_lynx.plan import Plan, parse_plan, relabel
from megatron_lynx.planner.baselines import module_sets, modules_of
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.schedule import Turn
from megatron_lynx.search.advice import advice, best_change, breakdown
from megatron_lynx.search.given import timeline_of
from megatron_lynx.search.problems import stage_problem
from megatron_lynx.search.rows import Row
from megatron_lynx.search.stages import StagePlans
from megatron_lynx.search.workflow import (
    METHODS,
    OFFLOAD,
    OPTIONS,
    RECOMPUTE_METHODS,
    SWITCHES,
    best_of,
    check_plan,
    compare,
    given_split,
    method_of,
    plan_job,
    plan_with_costs,
    planner_names,
    reference,
)
from megatron_lynx.simulator.memory import peak
from megatron_lynx.spec import Batch, Parallel
from megatron_lynx.units import GIB


def job(model: str = "gpt-1.3b", cluster: str = "a100-40g-pcie", **fields: Any) -> Job:
    """A job that needs recomputation on its first stages, with few layers so that it plans fast."""
    sizes: dict[str, Any] = {"tp": 2, "pp": 4, "vpp": 1, "micro": 16, "layers": 8, "microbatches": 8}
    sizes |= {"memory": None, "layout": None, "costs": None, "check_split": True, **fields}
    return make_job(
        load_model(model, num_layers=sizes["layers"], vocab_size=8192),
        Parallel(tp=sizes["tp"], pp=sizes["pp"], vpp=sizes["vpp"]),
        Batch(
            seq_length=2048,
            micro_batch_size=sizes["micro"],
            global_batch_size=sizes["micro"] * sizes["microbatches"],
        ),
        cluster=load_cluster(cluster),
        memory_bytes=sizes["memory"],
        layout=sizes["layout"],
        costs=sizes["costs"],
        check_split=sizes["check_split"],
    )


TIGHT = job(memory=6 * GIB)
ROWS = compare(TIGHT)


def test_every_method_has_a_row() -> None:
    assert set(METHODS) - {OFFLOAD} <= set(planner_names())
    own = [row for row in ROWS if not row.method.endswith("+ search")]
    assert list(dict.fromkeys(method_of(row.method) for row in own)) == list(METHODS)
    sets = [row.method for row in own if method_of(row.method) == "modules"]
    assert len(sets) == len(set(sets)) == 2 ** len(kind_of(TIGHT.model).recompute_modules) - 2
    assert [row.method for row in ROWS[len(own) :]] == [
        "checkmate + search",
        "adapipe + search",
        "heu + search",
        "opt + search",
    ]


def test_recomputation_is_needed_and_enough() -> None:
    fits = {row.method: row.fits for row in ROWS}
    assert not fits["none"]
    assert fits["opt"]
    for row in ROWS:
        assert row.fits == (row.reason is None) == (row.iteration_ns is not None)
        assert all(stage.peak_bytes <= TIGHT.memory_bytes for stage in row.stages)


def test_lynx_is_never_below_either_baseline() -> None:
    lynx, megatron = best_of(ROWS, ("opt",)), best_of(ROWS, RECOMPUTE_METHODS)
    assert lynx is not None
    for other in (megatron, best_of(ROWS, ("checkmate",)), best_of(ROWS, ("heu",))):
        assert other is not None
        speedup = lynx.speedup_over(other)
        assert speedup is not None
        assert speedup >= 1
    for row in ROWS:
        if row.planner == "opt":
            same = reference(row, ROWS)
            assert same is not None
            assert same.method == row.method.replace("opt", "checkmate")
            assert (row.speedup_over(same) or 0) >= 1


def test_switches_show_what_each_window_is_worth() -> None:
    rows = compare(TIGHT, ("checkmate", "opt"), partitioned=(), switches=True)
    assert [row.method for row in rows[2:]] == [f"opt {name}" for name in SWITCHES]
    checkmate, everything = rows[0].iteration_ns, rows[1].iteration_ns
    assert checkmate is not None
    assert everything is not None
    for row in rows[2:]:
        assert row.iteration_ns is not None
        assert row.iteration_ns <= checkmate


def test_moving_layers_is_never_worse() -> None:
    times = {row.method: row.iteration_ns for row in ROWS if row.iteration_ns is not None}
    for method in ("heu", "opt"):
        assert times[f"{method} + search"] <= times[method]


def test_rows_agree_with_the_simulator() -> None:
    planned = plan_job(TIGHT, "opt")
    timeline = planned.timeline()
    assert timeline.makespan_ns == planned.simulated_ns
    for row in planned.row().stages:
        assert row.static_bytes + peak(timeline, row.stage).size_bytes <= row.peak_bytes
        assert row.peak_bytes <= TIGHT.memory_bytes
    assert sum(len(stage.layers) for stage in planned.row().stages) == 8


def test_a_plan_comes_back_from_its_text() -> None:
    planned = plan_job(TIGHT, "heu")
    again = parse_plan(str(planned.plan))
    assert again == planned.plan
    assert timeline_of(TIGHT, again).makespan_ns == planned.simulated_ns


def test_a_plan_of_another_job_is_refused() -> None:
    plan = plan_job(TIGHT, "none" if ROWS[0].fits else "heu").plan
    with pytest.raises(PlanError, match="made for another job"):
        check_plan(job(micro=8), plan)
    with pytest.raises(PlanError, match="has 3 stages"):
        check_plan(TIGHT, replace(plan, stages=plan.stages[:3]))


@pytest.mark.parametrize("planner", ["none", "full-uniform", "full-block", "selective", "heu"])
def test_roomy_jobs_recompute_nothing_they_need_not(planner: str) -> None:
    planned = plan_job(job(micro=1), planner)
    assert planned.plan.layout is None
    if planner in ("none", "heu"):
        assert all(not layer.choices for stage in planned.plan.stages for layer in stage.layers)


def test_full_recomputation_has_one_number_for_all_stages() -> None:
    planned = plan_job(TIGHT, "full-block")
    number = int(planned.plan.planner.rpartition("-")[2])
    dropped = [sum(bool(layer.choices) for layer in stage.layers) for stage in planned.plan.stages]
    assert set(dropped) == {number}
    tighter = plan_job(job(memory=11 * GIB // 2), "full-block")
    assert int(tighter.plan.planner.rpartition("-")[2]) >= number


def test_interleaved_jobs_are_planned() -> None:
    for planner in ("heu", "opt", "selective", "full-uniform"):
        planned = plan_job(job(vpp=2, micro=8), planner)
        assert all(len(stage.chunks) == 2 for stage in planned.plan.stages)
        assert planned.timeline().makespan_ns == planned.simulated_ns


@pytest.mark.parametrize("planner", ["checkmate", "heu", "opt"])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_interleaved_jobs_stay_within_memory(planner: str, share: float) -> None:
    """At every moment of the schedule, whichever chunk holds most then."""

    def interleaved(memory: int | None = None) -> Job:
        return job(vpp=2, layers=16, micro=8, memory=memory)

    bounds = []
    for name in ("checkmate", "none"):
        with pytest.raises(InfeasibleError) as caught:
            plan_job(interleaved(GIB), name)
        bounds.append(caught.value.needed_bytes)
    least, most = bounds
    tight = interleaved(int(least + share * (most - least)))
    planned = plan_job(tight, planner)
    timeline = planned.timeline()
    for row in planned.row().stages:
        assert row.static_bytes + peak(timeline, row.stage).size_bytes <= row.peak_bytes
        assert row.peak_bytes <= tight.memory_bytes


def test_without_a_pipeline() -> None:
    planned = plan_job(job(pp=1, layers=4, microbatches=2), "opt", "search")
    assert planned.plan.layout is None
    assert planned.plan.stages[0].chunks == ((0, 1, 2, 3),)


def test_heu_is_never_below_checkmate_in_a_comparison() -> None:
    rows = compare(TIGHT, ("checkmate", "heu"), partitioned=("checkmate", "heu"))
    checkmate, heu, moved, heu_moved = (row.iteration_ns for row in rows)
    assert None not in (checkmate, heu, moved, heu_moved)
    assert (heu or 0) <= (checkmate or 0)
    assert (heu_moved or 0) <= (moved or 0)


def test_layers_that_do_not_divide_need_a_layout() -> None:
    with pytest.raises(ConfigError, match=r"--pp 4 does not divide --num-layers 10 .* --pp 2 works"):
        job(layers=10)
    with pytest.raises(ConfigError, match=r"--vpp 3 does not divide --num-layers 8 .* --vpp 2 works"):
        job(layers=8, vpp=3, pp=2)
    planned = plan_job(job(layers=10, check_split=False), "heu", "search")
    assert planned.plan.layout is not None
    assert sum(len(stage.plan.layers) for stage in planned.stages) == 10


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et*3|t*3L", "has 2 stages, which --pp 4 does not divide"),
        ("Et|t|t|tL", "has 4 layers, but --num-layers is 8"),
        ("Et|t|t|t|t|t|t|tL", "--vpp 2 works"),
        ("Et*2|t*2|q|t*2L", "none of E"),
    ],
)
def test_a_layout_of_another_job_is_refused(layout: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_job(job(layout=layout), "none")


def test_a_given_layout_is_kept() -> None:
    uneven = job(layout="Et*3|t*2|t*2|tL")
    assert given_split(uneven) == (3, 2, 2, 1)
    planned = plan_job(uneven, "heu")
    assert planned.plan.layout == "Et*3|t*2|t*2|tL"
    assert [stage.chunks for stage in planned.plan.stages] == [((0, 1, 2),), ((3, 4),), ((5, 6),), ((7,),)]


@pytest.mark.parametrize("planner", ["heu", "opt", "full-uniform", "checkmate"])
def test_the_smallest_budget_fits_and_less_does_not(planner: str) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_job(job(memory=3 * GIB), planner)
    error = caught.value
    assert error.budget_bytes == 3 * GIB
    assert f"stage {error.stage}" in str(error)
    assert plan_job(job(memory=error.needed_bytes + 200_000), planner).plan.stages
    with pytest.raises(InfeasibleError):
        plan_job(job(memory=error.needed_bytes - 200_000), planner)


def test_inputs_are_dropped_where_nothing_else_fits() -> None:
    deep = job(tp=4, pp=1, layers=32)
    with pytest.raises(InfeasibleError) as caught:
        plan_job(replace(deep, memory_bytes=3 * GIB), "full-uniform")
    tight = replace(deep, memory_bytes=caught.value.needed_bytes)
    with pytest.raises(InfeasibleError):
        plan_job(tight, "heu")
    plan = plan_job(tight, "opt", time_limit_s=6.0).plan
    assert any("input" in layer.dropped for layer in plan.stages[0].layers)


def test_the_smallest_budget_of_any_split_fits() -> None:
    with pytest.raises(InfeasibleError, match="layers a stage") as caught:
        plan_job(job(memory=3 * GIB), "heu", "search")
    needed = caught.value.needed_bytes
    assert needed <= plan_needed("heu")
    assert plan_job(job(memory=needed + 200_000), "heu", "search").plan.stages


def plan_needed(planner: str) -> int:
    with pytest.raises(InfeasibleError) as caught:
        plan_job(job(memory=3 * GIB), planner)
    return caught.value.needed_bytes


def test_more_memory_than_a_device_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--budget 200.00 GiB is more .* --budget 36.4GiB works"):
        job(memory=200 * GIB)
    with pytest.raises(InfeasibleError, match=r"but a device of .* has less"):
        plan_job(job("gpt-20b", layers=44, tp=1, pp=4, micro=1), "heu")


def test_costs_of_another_shape_are_refused() -> None:
    costs = job(micro=8).costs
    with pytest.raises(ConfigError, match=r"--profile: .* measured for another layer shape"):
        job(costs=costs)
    assert job(costs=replace(costs, graph="")).costs.source == costs.source


def test_a_trainer_plans_with_what_it_measured() -> None:
    one = job()
    plan = plan_with_costs(
        one.model, one.parallel, one.batch, costs=one.costs, memory_bytes=6 * GIB, planner="heu"
    )
    assert isinstance(plan, Plan)
    assert plan == plan_job(replace(TIGHT, cluster=None), "heu").plan
    with pytest.raises(ConfigError, match="--cluster is missing"):
        make_job(one.model, one.parallel, one.batch)
    with pytest.raises(ConfigError, match="--budget is missing"):
        make_job(one.model, one.parallel, one.batch, costs=one.costs)
    with pytest.raises(ConfigError, match="--partition 'best' is unknown"):
        plan_job(one, "heu", "best")


@pytest.mark.parametrize(
    "planner", ["opt", "heu", "checkmate", "adapipe", "tail-free", "full-uniform", "selective"]
)
def test_what_cannot_run_again_is_kept_and_counted(planner: str) -> None:
    """Its bytes are in what a microbatch keeps: a budget that is just enough without it is not enough."""
    one, fixed = job(memory=32 * GIB), frozenset({"linear_fc1", "core_attention"})
    held = replace(one, graph=replace(one.graph, fixed=fixed))
    assert held.graph.fingerprint() == one.graph.fingerprint()
    for stage in plan_job(held, planner).stages:
        assert not {name for layer in stage.plan.layers for name, _ in layer.choices} & fixed
    with pytest.raises(InfeasibleError) as free:
        plan_job(replace(one, memory_bytes=1 * GIB), planner)
    with pytest.raises(InfeasibleError) as kept:
        plan_job(replace(held, memory_bytes=1 * GIB), planner)
    assert kept.value.needed_bytes > free.value.needed_bytes


def test_problems_know_their_place() -> None:
    first = stage_problem(TIGHT, 0, ((0, 1),), 5_000)
    last = stage_problem(TIGHT, 3, ((6, 7),), 5_000)
    assert first.turns == (Turn(moments=((4,),), served=True, waits=True),)
    assert last.turns == (Turn(moments=((1,),), served=False, waits=False),)
    assert [w.kind for w in first.windows(0)] == ["fwd"] * 4 + ["stall"] + ["bwd"] * 4
    assert first.budget_bytes == TIGHT.memory_bytes - TIGHT.footprint(0, 2).static_bytes
    assert (first.head_ns, last.head_ns) == (0, TIGHT.costs.head_window_ns)


def test_relabelled_plans_cost_the_same() -> None:
    bench = StagePlans(TIGHT, OPTIONS, 10.0)
    local = bench.stage(1, (2,), "heu", 1_000_000)
    moved = relabel(local.plan, ((2, 3),))
    assert [layer.layer for layer in moved.layers] == [2, 3]
    assert relabel(moved, local.plan.chunks) == local.plan
    assert bench.times(replace(local, plan=moved)) == bench.times(local)


@given(st.integers(6, 12), st.sampled_from(["a100-40g-pcie", "a100-40g-nvlink"]))
@settings(max_examples=6)
def test_more_memory_never_costs_time(gib: int, cluster: str) -> None:
    """Of one planner on one stage; the whole step follows within rounding of the stalls."""
    less, more = job(cluster=cluster, memory=gib * GIB), job(cluster=cluster, memory=(gib + 2) * GIB)
    for planner in ("checkmate", "full-block"):
        assert plan_job(more, planner).iteration_ns <= plan_job(less, planner).iteration_ns


def test_rows_compare() -> None:
    slow = Row(method="a", planner="a", fits=True, iteration_ns=300)
    fast = Row(method="b", planner="full-block-3", fits=True, iteration_ns=100)
    absent = Row(method="c", planner="c", fits=False, reason="too large")
    assert fast.speedup_over(slow) == 3
    assert fast.speedup_over(absent) is None
    assert best_of((slow, fast, absent), ("a", "full-block", "c")) is fast
    assert best_of((absent,), ("c",)) is None


def test_the_public_names() -> None:
    """A flow with nothing but the package's own names."""
    model = megatron_lynx.load_model("gpt-1.3b")
    sizes = megatron_lynx.Parallel(tp=2, pp=2)
    batch = megatron_lynx.Batch(seq_length=2048, micro_batch_size=1, global_batch_size=8)
    one = megatron_lynx.make_job(model, sizes, batch, cluster=megatron_lynx.load_cluster("toy"))
    planned = megatron_lynx.plan_job(one, "heu")
    assert megatron_lynx.parse_plan(str(planned.plan)) == planned.plan
    assert isinstance(one.costs.layer, LayerCosts)
    assert one.graph == layer_graph(model, sizes, batch)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = megatron_lynx.nothing_of_that_name


def test_every_combination_of_modules_costs_what_megatron_runs_again() -> None:
    """Each set of modules is a plan that verify and the simulator accept; it costs its regions' work."""
    one = job(memory=30 * GIB)
    kind = kind_of(one.model)
    plain = plan_job(one, "none")
    for name in module_sets(kind.recompute_modules):
        planned = plan_job(one, name)
        regions = [region for module in modules_of(name) for region in kind.recompute_modules[module]]
        for stage in planned.stages:
            problem = stage_problem(one, stage.plan.stage, stage.plan.chunks)
            again = sum(problem.demand_ns(region) for region in regions)
            assert stage.report.exposed_ns == len(stage.plan.layers) * again
        assert planned.plan.planner == name
        assert timeline_of(one, planned.plan).makespan_ns == planned.simulated_ns
        assert planned.iteration_ns > plain.iteration_ns
        for small, large in zip(planned.stages, plain.stages, strict=True):
            assert small.report.kept_bytes < large.report.kept_bytes
    best = plan_job(one, "modules")
    assert best.iteration_ns == min(
        plan_job(one, n).iteration_ns for n in module_sets(kind.recompute_modules)
    )


def test_an_unknown_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="modules-moe needs a layer with moe; its modules: core_attn, mlp"):
        plan_job(job(memory=30 * GIB), "modules-moe")


def test_advice_names_a_change_that_helps() -> None:
    """The change is made, and needs what it is said to need."""
    small = job(memory=3 * GIB)
    change = best_change(small)
    assert change is not None
    assert change.needed_bytes < breakdown(small).needed_bytes
    found = breakdown(small)
    assert sum(size for _, size in found.owners) == found.needed_bytes
    assert "--planner opt" in advice(job(memory=30 * GIB))
