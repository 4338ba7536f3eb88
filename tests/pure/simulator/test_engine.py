"""The event engine: closed forms, an independent solution of the same rules, lower bounds, speed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx import schedule
from megatron_lynx.graph import LayerGraph
from megatron_lynx.schedule import Action
from megatron_lynx.simulator.engine import (
    SimJob,
    SimStage,
    iteration_ns,
    play,
    program,
    sim_stage,
    simulate,
)
from megatron_lynx.simulator.ledger import GraphIndex
from megatron_lynx.spec import Parallel
from tests.pure.simulator.jobs import job_of, wild_jobs


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 10**9), st.integers(0, 10**9))
def test_uniform_makespan_is_exact(p: int, m: int, forward: int, backward: int) -> None:
    stages = [SimStage.of([forward], [backward])] * p
    assert iteration_ns(stages, Parallel(pp=p), m) == (m + p - 1) * (forward + backward)


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 6), st.integers(1, 9999), st.integers(1, 9999))
def test_interleaved_makespan_is_exact(p: int, v: int, groups: int, forward: int, backward: int) -> None:
    """(m v + p - 1)(f + b) with f and b per chunk: the bubble shrinks by v (arXiv 2104.04473)."""
    m = p * groups
    stages = [SimStage.of([forward] * v, [backward] * v)] * p
    assert iteration_ns(stages, Parallel(pp=p, vpp=v), m) == (m * v + p - 1) * (forward + backward)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Parallel, int, list[SimStage], list[list[int]], int]:
    """Uneven pipelines; also [forwards, backwards, early] per chunk of each rank."""
    p = draw(st.integers(1, 5))
    v = 1 if p == 1 else draw(st.integers(1, 3))
    m = draw(st.integers(1, 12)) if v == 1 else p * draw(st.integers(1, 4))
    times = [[draw(st.integers(0, 100)) for _ in range(3 * v)] for _ in range(p)]
    stages = [SimStage.of(t[:v], t[v : 2 * v], t[2 * v :]) for t in times]
    return Parallel(pp=p, vpp=v), m, stages, times, draw(st.integers(0, 60))


@given(pipelines())
def test_engine_equals_a_fixed_point_of_its_rules(
    case: tuple[Parallel, int, list[SimStage], list[list[int]], int],
) -> None:
    """Relax all rules until nothing changes: no order of events, no program."""
    parallel, m, stages, times, p2p = case
    p, v = parallel.pp, parallel.vpp
    orders = schedule.schedule(parallel, m)
    ends: dict[tuple[int, Action], int] = {(r, a): 0 for r in range(p) for a in orders[r]}
    sent: dict[tuple[int, Action], int] = dict(ends)
    changed = True
    while changed:
        changed = False
        for rank in range(p):
            links = {True: 0, False: 0}
            free = 0
            for action in orders[rank]:
                row = 0 if action.forward else v
                early = 0 if action.forward else times[rank][2 * v + action.chunk]
                begin = free + early
                for need in schedule.requires(action, rank, p, v):
                    begin = max(begin, sent[need] if need[0] != rank else ends[need])
                free = begin + times[rank][row + action.chunk]
                goes_on = any(
                    (rank, action) in schedule.requires(Action(action.kind, action.microbatch, c), r, p, v)
                    for r in ((rank + 1) % p, (rank - 1) % p)
                    for c in range(v)
                    if r != rank
                )
                arrival = free
                if goes_on and p2p:
                    arrival = max(free, links[action.forward]) + p2p
                    links[action.forward] = arrival
                if ends[rank, action] != free or sent[rank, action] != arrival:
                    ends[rank, action], sent[rank, action] = free, arrival
                    changed = True
    timeline = play(program(parallel, m), stages, p2p)
    for rank in timeline.runs:
        for run in rank:
            assert run.end_ns == ends[run.stage, run.action]
    assert timeline.makespan_ns == iteration_ns(stages, parallel, m, p2p) == max(ends.values())


@given(pipelines())
def test_never_below_a_lower_bound(
    case: tuple[Parallel, int, list[SimStage], list[list[int]], int],
) -> None:
    parallel, m, stages, times, p2p = case
    p, v = parallel.pp, parallel.vpp
    found = iteration_ns(stages, parallel, m, p2p)
    through = sum(sum(t[: 2 * v]) for t in times) + 2 * (p * v - 1) * p2p
    assert found >= through, "one microbatch through all stages"
    for rank in range(p):
        fill = sum(times[r][0] + p2p for r in range(rank))
        drain = sum(times[r][v] + p2p for r in range(rank))
        own = m * sum(times[rank][: 2 * v])
        assert found >= fill + own + drain, "a rank's own work, between the fill and the drain"
        early = sum(times[rank][2 * v :]) * m
        assert found >= own + early, "early work occupies the rank too"
    if v == 1:
        for rank in range(p):
            alive = p - rank
            rest = sum(times[r][0] + times[r][1] for r in range(rank, p)) + 2 * (p - 1 - rank) * p2p
            assert found >= (m // alive) * rest, "limited microbatches in flight"


@given(pipelines(), st.integers(0, 4), st.integers(1, 50))
def test_more_work_never_ends_earlier(
    case: tuple[Parallel, int, list[SimStage], list[list[int]], int], where: int, more: int
) -> None:
    parallel, m, stages, times, p2p = case
    v, rank = parallel.vpp, where % parallel.pp
    slower = list(times[rank])
    slower[where % (3 * v)] += more
    changed = list(stages)
    changed[rank] = SimStage.of(slower[:v], slower[v : 2 * v], slower[2 * v :])
    assert iteration_ns(changed, parallel, m, p2p) >= iteration_ns(stages, parallel, m, p2p)
    assert iteration_ns(stages, parallel, m, p2p + more) >= iteration_ns(stages, parallel, m, p2p)


def test_p2p_is_exposed_even_in_a_balanced_pipeline() -> None:
    """Four stages of T = 3 and transfers of 0.1 repeat every 3.15, as microbatches are few."""
    stages = [SimStage.of([1000], [2000])] * 4
    parallel = Parallel(pp=4)
    periods = [iteration_ns(stages, parallel, m, 100) for m in (40, 80)]
    assert periods[1] - periods[0] == 40 * 3150


def test_early_work_hides_behind_the_wait_for_the_gradient() -> None:
    """Two stages; the first waits for the second, which is slower."""
    parallel = Parallel(pp=2)
    slow = SimStage.of([10], [40])
    for early, exposed in ((0, 0), (40, 0), (50, 0), (60, 10)):
        first = SimStage.of([10], [20], [early])
        timeline = play(program(parallel, 1), [first, slow])
        assert timeline.makespan_ns == 80 + exposed
        totals = timeline.totals_ns(0)
        assert totals["recompute-exposed"] == exposed
        assert totals["recompute-stall"] == early - exposed


def test_period_counts_a_microbatch_in_every_chunk() -> None:
    assert SimStage.of([1, 2], [3, 4], [100, 100]).period_ns == 10
    assert SimStage.of([5], [7]).period_ns == 12


@settings(max_examples=60)
@given(wild_jobs())
def test_simulate_and_the_cheap_entry_agree(job: SimJob) -> None:
    timeline = simulate(job)
    assert timeline.walks is not None
    assert isinstance(job.graph, LayerGraph)
    indexes = [GraphIndex(job.graph)] * job.parallel.pp
    tables = [
        sim_stage(plan, index, job.table, job.parallel, job.microbatches)
        for plan, index in zip(job.stages, indexes, strict=True)
    ]
    whole = [SimStage.from_walk(walk) for walk in timeline.walks]
    assert iteration_ns(whole, job.parallel, job.microbatches, job.table.p2p_ns) == timeline.makespan_ns
    assert iteration_ns(tables, job.parallel, job.microbatches, job.table.p2p_ns) == timeline.makespan_ns


def test_wrong_numbers_of_plans_or_chunks_are_refused() -> None:
    job = job_of(Parallel(pp=2), 4)
    with pytest.raises(ValueError, match="2 plans for 3"):
        simulate(replace(job, parallel=Parallel(pp=3)))
    with pytest.raises(ValueError, match="chunks"):
        simulate(replace(job, parallel=Parallel(pp=2, vpp=2)))


@pytest.mark.parametrize("vpp", [1, 3])
def test_a_large_job_takes_less_than_a_second(vpp: int) -> None:
    parallel = Parallel(tp=2, pp=16, vpp=vpp)
    choices = {"input_layernorm": "fwd:K:linear_proj", "core_attention": "demand", "activation": "stall"}
    job = job_of(parallel, 128, choices, counts=[6 // vpp] * (16 * vpp))
    started = time.process_time()
    simulate(job)
    assert time.process_time() - started < 1.0
