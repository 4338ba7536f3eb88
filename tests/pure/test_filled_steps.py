"""With stalls filled a step is never longer, and the bench takes the filled plans where it is shorter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.graph import LayerGraph
from megatron_lynx.job import Job, make_job
from megatron_lynx.planner import PlannedStage, SolveOptions, plan
from megatron_lynx.planner.fill import STALL, filled
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.stages import StagePlans
from megatron_lynx.search.workflow import OPTIONS, SWITCHES, given_split, plan_job
from megatron_lynx.simulator import memory, passes
from megatron_lynx.simulator.engine import SimJob, sim_stage, simulate
from megatron_lynx.simulator.timeline import Timeline
from megatron_lynx.spec import Batch, Parallel
from megatron_lynx.units import MIB
from tests.pure.simulator.jobs import problem_of
from tests.pure.simulator.test_memory import planning

# Whole steps ------------------------------------------------------------------------------------


def filled_job(
    job: SimJob, planner: str, budget: int, stall_ns: int, soft: bool
) -> tuple[SimJob, SimJob, list[int]]:
    """The job planned, the same with every stall filled, and each stage's peak as reported."""
    before, after, peaks = [], [], []
    parallel = job.parallel
    for rank in range(parallel.pp):
        problem = problem_of(job, rank, stall_ns, budget)
        planned = plan(problem, planner, SolveOptions(soft=soft, time_limit_s=2.0))
        found = filled(replace(problem, has_stall=True), planned)
        before.append(planned.plan)
        after.append(found.plan)
        peaks.append(found.report.peak_bytes)
        assert found.report.peak_bytes <= budget
    return replace(job, stages=tuple(before)), replace(job, stages=tuple(after)), peaks


@pytest.mark.parametrize("planner", ["checkmate", "heu", "full-uniform-1"])
def test_a_step_is_never_longer_and_stays_in_memory(planner: str) -> None:
    shorter, more = 0, 0

    @settings(max_examples=60)
    @given(planning())
    def hold(case: tuple[SimJob, int, int, bool]) -> None:
        nonlocal shorter, more
        job, budget, stall_ns, soft = case
        try:
            plain, full, peaks = filled_job(job, planner, budget, stall_ns, soft)
        except InfeasibleError:
            return
        old, new = simulate(plain), simulate(full)
        assert new.makespan_ns <= old.makespan_ns
        shorter += new.makespan_ns < old.makespan_ns
        more += check_work(plain, full, old, new)
        for rank, peak in enumerate(peaks):
            found = memory.peak(new, rank).size_bytes
            assert found == peak

    hold()
    assert shorter > 0, "no step got shorter"
    assert more > 0, "nothing was done in a stall that was on demand before"


def check_work(plain: SimJob, full: SimJob, old: Timeline, new: Timeline) -> int:
    """The same work is done, of each variant of a pass; returns how much more a stall hides, in ns."""
    hidden = 0
    for rank, (a, b) in enumerate(zip(plain.stages, full.stages, strict=True)):
        assert isinstance(plain.graph, LayerGraph)
        one = sim_stage(a, plain.graph, plain.table, plain.parallel, plain.microbatches)
        two = sim_stage(b, plain.graph, plain.table, plain.parallel, plain.microbatches)
        sums = [[e + t for e, t in zip(s.early_ns, s.body_ns, strict=True)] for s in (one, two)]
        assert sums[0] == sums[1]
        hidden += new.totals_ns(rank)[passes.STALL] - old.totals_ns(rank)[passes.STALL]
    return hidden


# StagePlans ------------------------------------------------------------------------------------------


def balanced(memory_bytes: int, **sizes: int) -> Job:
    """Stages of equal layers alone: no embedding, no output layer, no time on the pipeline link."""
    given = {"tp": 1, "pp": 2, "vpp": 1, "microbatches": 4, **sizes}
    parallel = Parallel(tp=given["tp"], pp=given["pp"], vpp=given["vpp"])
    small: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 1024,
    }
    model = load_model("gpt-1.3b", **small, attention="unfused", transformer_impl="local")
    batch = Batch(seq_length=512, micro_batch_size=1, global_batch_size=given["microbatches"])
    bare: dict[str, Any] = dict.fromkeys(
        (
            *("embedding_forward_ns", "embedding_backward_ns", "head_forward_ns"),
            *("head_backward_ns", "head_window_ns", "p2p_ns"),
        ),
        0,
    )
    one = make_job(model, parallel, batch, cluster=load_cluster("toy"), memory_bytes=memory_bytes)
    return replace(one, costs=replace(one.costs, **bare))


TIGHT = balanced(350 * MIB)


def without_stalls(job: Job, planner: str) -> tuple[PlannedStage, ...]:
    """The best plans that put nothing into stalls."""
    return StagePlans(job, SWITCHES["without stalls"], 20.0).best(given_split(job), planner)


@pytest.mark.parametrize("planner", ["windows", "heu", "opt"])
def test_balanced_stages_rebuild_before_the_first_backward_and_in_the_cooldown(planner: str) -> None:
    found = plan_job(TIGHT, planner)
    plain = simulated(TIGHT, without_stalls(TIGHT, planner))
    timeline = found.timeline()
    assert [stage.filled for stage in found.stages] == [True, False], "the last stage waits for nothing"
    assert timeline.makespan_ns == found.simulated_ns < plain.makespan_ns
    assert timeline.stall_ns(0) == 0, "no wait in the steady state"
    assert plain.totals_ns(0)[passes.STALL] == 0 < timeline.totals_ns(0)[passes.STALL]
    for stage in found.stages:
        static = TIGHT.footprint(stage.plan.stage, 4).static_bytes
        peak = memory.peak(timeline, stage.plan.stage).size_bytes
        assert peak == stage.report.peak_bytes <= TIGHT.memory_bytes - static


def simulated(job: Job, stages: Sequence[PlannedStage]) -> Timeline:
    """A step of the job under plans that its bench has made."""
    placed = StagePlans(job, OPTIONS, 1.0).placed(given_split(job), stages)
    return simulate(
        SimJob(
            stages=tuple(stage.plan for stage in placed),
            graph=job.graph,
            table=job.costs,
            parallel=job.parallel,
            microbatches=job.microbatches,
            workspace_bytes=job.workspace_bytes,
        )
    )


def in_stall(stages: Sequence[PlannedStage]) -> int:
    """How many regions are rebuilt in a stall."""
    return sum(c == STALL for s in stages for layer in s.plan.layers for _, c in layer.choices)


@pytest.mark.parametrize("switch", ["without stalls", "without overrun"])
def test_what_is_switched_off_is_not_filled(switch: str) -> None:
    """Balanced stages leave no stall to plan for; work in one is always beyond its length."""
    stages = plan_job(TIGHT, "opt", options=SWITCHES[switch]).stages
    assert not any(stage.filled for stage in stages)
    assert in_stall(stages) == 0
    assert in_stall(plan_job(TIGHT, "opt", options=SWITCHES["without forward windows"]).stages) > 0


def test_the_inner_loop_of_a_search_fills_nothing() -> None:
    bench, split = StagePlans(TIGHT, OPTIONS, 20.0), given_split(TIGHT)
    one, four = bench.best(split, "heu", rounds=1), bench.best(split, "heu")
    assert [stage.filled for stage in one] == [False, False]
    assert [stage.filled for stage in four] == [True, False]
    assert bench.score(four) < bench.score(one)
    assert not any(stage.filled for stage in bench.whole(split, "checkmate"))


@pytest.mark.parametrize(("stages", "mib"), [(2, 346), (2, 370), (4, 250), (4, 280), (4, 310)])
def test_opt_is_no_worse_than_heu_when_both_are_filled(stages: int, mib: int) -> None:
    job = balanced(mib * MIB, pp=stages, microbatches=8)
    opt, heu = plan_job(job, "opt"), plan_job(job, "heu")
    assert any(stage.filled for stage in heu.stages)
    assert opt.simulated_ns <= heu.simulated_ns


@pytest.mark.parametrize("mib", [268, 286, 298])
def test_interleaved_stages_are_filled_within_memory(mib: int) -> None:
    job = balanced(mib * MIB, pp=4, vpp=2, microbatches=8)
    found = plan_job(job, "heu")
    assert any(stage.filled for stage in found.stages)
    plain = simulated(job, without_stalls(job, "heu"))
    timeline = found.timeline()
    assert timeline.makespan_ns == found.simulated_ns < plain.makespan_ns
    for stage in found.stages:
        static = job.footprint(stage.plan.stage, 2).static_bytes
        peak = memory.peak(timeline, stage.plan.stage).size_bytes
        assert peak <= stage.report.peak_bytes <= job.memory_bytes - static
