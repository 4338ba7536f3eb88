"""Memory over time: starts and ends at zero, agrees with ``verify``, keeps to the budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.graph import LayerGraph
from megatron_lynx.planner import SolveOptions, plan, verify
from megatron_lynx.planner.verify import walk as verified_walk
from megatron_lynx.schedule import in_flight
from megatron_lynx.simulator import memory
from megatron_lynx.simulator.engine import SimJob, simulate
from megatron_lynx.simulator.passes import OWNERS
from megatron_lynx.simulator.walk import StageWalk
from megatron_lynx.spec import Parallel
from tests.pure.simulator.jobs import graph_of, job_of, parallels, problem_of, table_of, wild_jobs


@settings(max_examples=150)
@given(wild_jobs())
def test_memory_starts_and_ends_at_zero(job: SimJob) -> None:
    timeline = simulate(job)
    for stage in range(job.parallel.pp):
        assert memory.left_over(timeline, stage) == {}
        points = memory.curve(timeline, stage)
        assert points[-1][1] == 0
        assert all(held >= 0 for _, held in points)
        assert [at for at, _ in points] == sorted(at for at, _ in points)
        peak = memory.peak(timeline, stage)
        assert peak.size_bytes == max(held for _, held in points)
        assert sum(size for _, size in peak.owners) == peak.size_bytes
        assert {owner for owner, _ in peak.owners} <= set(OWNERS)
        shifted = memory.curve(timeline, stage, 77)
        assert [(at, held + 77) for at, held in points] == list(shifted)


@settings(max_examples=60)
@given(wild_jobs())
def test_counting_by_region_never_holds_more(job: SimJob) -> None:
    coarse, fine = simulate(replace(job, fine=False)), simulate(replace(job, fine=True))
    assert coarse.makespan_ns == fine.makespan_ns
    for stage in range(job.parallel.pp):
        assert memory.peak(fine, stage).size_bytes <= memory.peak(coarse, stage).size_bytes


@given(parallels(), st.integers(1, 9))
def test_without_recomputation_the_peak_is_all_microbatches_in_flight(parallel: Parallel, m: int) -> None:
    m = m if parallel.vpp == 1 else parallel.pp * m
    timeline = simulate(job_of(parallel, m))
    kept = graph_of(parallel).kept_bytes()
    for stage in range(parallel.pp):
        alive = in_flight(parallel, m, stage)
        peak = memory.peak(timeline, stage)
        assert peak.size_bytes == 2 * sum(alive) * kept
        assert peak.owner == "kept"


PLANNERS = ("none", "full-uniform-1", "full-uniform-2", "full-uniform-3", "full-block-1", "selective",
            "tail-free", "heu")  # fmt: skip


def _planned(job: SimJob, planner: str, budget: int, stall_ns: int, soft: bool) -> tuple[SimJob, list[int]]:
    """The job with every stage planned, and what ``verify`` counts for each."""
    stages, graphs, peaks = [], list[LayerGraph](), []
    for stage in range(job.parallel.pp):
        problem = problem_of(job, stage, stall_ns, budget)
        planned = plan(problem, planner, SolveOptions(soft=soft, time_limit_s=2.0))
        assert verify(problem, planned.plan, graph=planned.graph, soft=True) == ()
        notes = verified_walk(problem, planned.plan, graph=planned.graph, soft=soft)
        stages.append(planned.plan)
        graphs.append(planned.graph)
        peaks.append(max(step.alive_bytes for step in notes.steps))
    return replace(job, stages=tuple(stages), graph=tuple(graphs)), peaks


@st.composite
def planning(draw: st.DrawFn) -> tuple[SimJob, int, int, bool]:
    """A job, a budget, the length of a stall, and whether windows are soft."""
    parallel = draw(parallels())
    m = draw(st.integers(1, 9)) if parallel.vpp == 1 else parallel.pp * draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(1, 3), min_size=parallel.pp, max_size=parallel.pp)) * parallel.vpp
    table = table_of(parallel, wait=draw(st.integers(0, 120)), p2p=draw(st.integers(0, 50)))
    workspace = draw(st.sampled_from([(), (5000, 9000, 100)]))
    job = job_of(parallel, m, counts=counts, table=table, workspace=workspace)
    whole = graph_of(parallel).kept_bytes() * max(counts) * parallel.pp
    budget = whole * draw(st.sampled_from([40, 60, 80, 100, 130])) // 100 + 5000
    return job, budget, draw(st.sampled_from([0, 30, 90])), draw(st.booleans())


@pytest.mark.parametrize("planner", [*PLANNERS, "opt"])
def test_the_two_referees_agree_to_the_byte(planner: str) -> None:
    """The same peak, though no line is shared; with one chunk a rank and with several."""
    fitted = 0

    @settings(max_examples=8 if planner == "opt" else 40)
    @given(planning())
    def agree(case: tuple[SimJob, int, int, bool]) -> None:
        nonlocal fitted
        job, budget, stall_ns, soft = case
        try:
            planned, peaks = _planned(job, planner, budget, stall_ns, soft)
        except InfeasibleError:
            return
        fitted += 1
        timeline = simulate(planned)
        for stage, verified in enumerate(peaks):
            simulated = memory.peak(timeline, stage).size_bytes
            assert simulated == verified <= budget

    agree()
    assert fitted >= 2, "too few problems had a plan"


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_baseline_is_counted_alike(planner: str) -> None:
    """The same, with room for everything, so that no planner is left out by chance."""
    for parallel in (Parallel(tp=2, pp=3), Parallel(tp=2, pp=2, sequence_parallel=True), Parallel()):
        job = job_of(parallel, 6, counts=[4, 3, 3][: parallel.pp], workspace=(1234, 700, 900))
        planned, peaks = _planned(job, planner, 1 << 50, 40, False)
        timeline = simulate(planned)
        for stage, verified in enumerate(peaks):
            assert memory.peak(timeline, stage).size_bytes == verified


def test_the_peak_names_its_owner_and_its_place() -> None:
    parallel = Parallel(tp=2, pp=2)
    choices = {"linear_fc1": "fwd:K:linear_proj", "activation": "demand"}
    peak = memory.peak(simulate(job_of(parallel, 4, choices)), 0)
    assert str(peak.action) == "B0.0"
    assert (peak.layer, peak.region) == (1, "activation")
    owners = dict(peak.owners)
    assert set(owners) == {"kept", "rebuilt in forward windows", "rebuilt on demand"}
    assert peak.owner == max(owners, key=lambda name: owners[name])
    assert str(peak).startswith(f"stage 0: {peak.size_bytes} bytes in B0.0 layer 1 activation: ")


@pytest.mark.parametrize("planner", ["full-uniform-2", "selective", "heu"])
def test_what_the_planner_hides_and_exposes_is_what_happens(planner: str) -> None:
    """One microbatch in the steady state of 1F1B, with windows that may not be overrun."""
    fitted = 0

    @settings(max_examples=40)
    @given(planning(), st.sampled_from([1.0, 1.25]))
    def agree(case: tuple[SimJob, int, int, bool], contention: float) -> None:
        nonlocal fitted
        job, budget, stall_ns, _ = case
        if job.parallel.vpp > 1:
            return
        job = replace(job, table=replace(job.table, layer=replace(job.table.layer, contention=contention)))
        for stage in range(job.parallel.pp):
            problem = problem_of(job, stage, stall_ns, budget)
            try:
                planned = plan(problem, planner)
            except InfeasibleError:
                return
            fitted += 1
            walk = StageWalk(planned.plan, planned.graph, job.table, job.parallel.pp)
            serves = 0 if problem.turns[0].served else None
            passes = walk.forward(0, serves), walk.backward(0, serves)
            times = Counter[str]()
            for piece in (*passes[0].body, *passes[1].body, *passes[1].early):
                times[piece.kind] += piece.end_ns - piece.start_ns
            assert times["recompute-exposed"] == planned.report.exposed_ns
            assert times["recompute-hidden"] + times["recompute-stall"] == planned.report.hidden_ns

    agree()
    assert fitted >= 10, "too few problems had a plan"
