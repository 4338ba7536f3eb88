"""What is hidden, what overruns, what is exposed, what fills the stall: by hand, and in general."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.graph import LayerGraph, Region, Storage
from megatron_lynx.layers.local import backward_slots, forward_slots
from megatron_lynx.plan import Window
from megatron_lynx.simulator.engine import SimJob, simulate
from megatron_lynx.simulator.timeline import Timeline
from megatron_lynx.simulator.walk import StageWalk
from megatron_lynx.spec import Parallel
from tests.pure.simulator.jobs import FORWARD, WGRAD, job_of, stage_plan, table_of, wild_jobs

TWO = Parallel(tp=2, pp=2)
LAYER_FORWARD, LAYER_BACKWARD = sum(FORWARD.values()), sum(FORWARD.values()) + sum(WGRAD.values())


def _totals(job: SimJob, stage: int) -> dict[str, int]:
    return simulate(job).totals_ns(stage)


def _recomputed(totals: dict[str, int]) -> tuple[int, int, int]:
    return totals["recompute-hidden"], totals["recompute-stall"], totals["recompute-exposed"]


def test_without_recomputation_a_pass_is_its_layers_and_ends() -> None:
    job = job_of(TWO, 4)
    first, last = (StageWalk(plan, job.graph, job.table, 2) for plan in job.stages)
    costs = job.table.layer
    assert first.forward(0).body_ns == 2 * costs.layer_forward_ns + 7
    assert first.backward(0).body_ns == 2 * costs.layer_backward_ns + 9
    assert last.forward(0).body_ns == 2 * costs.layer_forward_ns + 60
    assert last.backward(0).body_ns == 2 * costs.layer_backward_ns + 120
    assert first.backward(0).early_ns == 0


@pytest.mark.parametrize(
    ("sequence_parallel", "wait", "layer_ns"),
    [
        # A layer's compute is 275. Contention 2: a GEMM of g is slowed to min(2 g, g + wait / 2).
        (False, 100, 275 + (100 - 40) + (100 - 30)),  # 2 * 40 and 2 * 30 fit into the wait
        (False, 70, 275 + 70 // 2 + (70 - 30)),  # 2 * 40 does not: 40 + 35; 2 * 30 does
        (False, 20, 275 + 2 * 20 // 2),
        (True, 100, 275 + 2 * 100 + 2 * (100 - 40) + 2 * (100 - 30)),
        (True, 70, 275 + 2 * 70 + 2 * 70 // 2 + 2 * (70 - 30)),
        (True, 20, 275 + 2 * 20 + 4 * 20 // 2),
    ],
)
def test_a_gemm_beside_a_collective_is_slowed(sequence_parallel: bool, wait: int, layer_ns: int) -> None:
    """Nothing is recomputed: the step is what the costs say of a layer."""
    assert LAYER_BACKWARD == 275
    parallel = Parallel(tp=2, sequence_parallel=sequence_parallel)
    table = table_of(parallel, wait=wait, contention=2.0, ends=False)
    job = job_of(parallel, 3, table=table)
    layer = table.layer
    assert layer.layer_backward_ns == layer_ns
    timeline = simulate(job)
    assert timeline.makespan_ns == 3 * 2 * (layer.layer_forward_ns + layer.layer_backward_ns)
    windows = sum(layer.window_ns(Window("bwd", 0, slot)) for slot in backward_slots(parallel))
    totals = timeline.totals_ns(0)
    assert totals["backward"] == 3 * 2 * (layer_ns - windows), "the GEMMs, slowed"
    assert totals["wait"] == 3 * 2 * (windows + len(forward_slots(parallel)) * wait)


@pytest.mark.parametrize("contention", [1.0, 1.3, 1.45])
@pytest.mark.parametrize("wait", [0, 7, 33, 46, 52, 90])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_backward_takes_what_the_costs_say(sequence_parallel: bool, wait: int, contention: float) -> None:
    parallel = Parallel(tp=2, sequence_parallel=sequence_parallel)
    job = job_of(parallel, 1, table=table_of(parallel, wait=wait, contention=contention))
    walk = StageWalk(job.stages[0], job.graph, job.table, 1)
    ends = 9 + 120
    assert walk.backward(0).body_ns == 2 * job.table.layer.layer_backward_ns + ends


def test_work_in_a_window_begins_when_the_slowed_gemm_is_over() -> None:
    """80 of 100 are taken by fc1's weight gradient at half speed; 20 do 10 of the attention's 20."""
    parallel = Parallel(tp=2)
    job = job_of(parallel, 1, table=table_of(parallel, wait=100, contention=2.0, ends=False))
    kept = job.stages[0]
    early = stage_plan(0, kept.chunks, {"core_attention": "bwd:1:linear_fc1"}).layers[0]
    again = replace(job, stages=(replace(kept, layers=(early, kept.layers[1])),))
    assert _recomputed(_totals(again, 0)) == (20, 0, 10)
    assert simulate(again).makespan_ns == simulate(job).makespan_ns + 10


def test_forward_windows_hide_what_fits() -> None:
    """Stage 0 of two, four microbatches: F1 F2 F3 serve B0 B1 B2; B3 is in the cooldown."""
    job = job_of(TWO, 4, {"core_attention": "fwd:K:linear_fc2"})
    hidden, stall, exposed = _recomputed(_totals(job, 0))
    assert (hidden, stall + exposed) == (3 * 2 * 20, 2 * 20)
    assert stall == 2 * 20, "the last backward's set is rebuilt while its gradient is on the way"
    assert _recomputed(_totals(job, 1)) == (0, 0, 4 * 2 * 20), "no forward windows on the last stage"


def test_a_window_that_is_too_short_costs_only_the_excess() -> None:
    job = job_of(TWO, 2, {"linear_fc1": "fwd:K:linear_proj"}, table=table_of(TWO, wait=25))
    hidden, _, exposed = _recomputed(_totals(job, 0))
    assert (hidden, exposed) == (2 * 25, 2 * 15)


def test_contention_stretches_work_only_while_the_collective_runs() -> None:
    """40 ns of work at half speed: 25 ns of window do 12.5 of it; 28 are left (rounded up)."""
    table = table_of(TWO, wait=25, contention=2.0)
    job = job_of(TWO, 2, {"linear_fc1": "fwd:K:linear_proj"}, table=table)
    hidden, _, exposed = _recomputed(_totals(job, 0))
    assert (hidden, exposed) == (2 * 25, 2 * 28)


def test_backward_windows_serve_the_layers_that_come_later() -> None:
    """The window of layer 1 rebuilds for layer 0; weight gradients already cover part of it."""
    job = job_of(Parallel(tp=2), 1)
    kept = job.stages[0]
    early = stage_plan(0, kept.chunks, {"activation": "bwd:1:linear_fc1"}).layers[0]
    plan = replace(kept, layers=(early, kept.layers[1]))
    totals = _totals(replace(job, stages=(plan,)), 0)
    assert _recomputed(totals) == (5, 0, 0)
    none = _totals(job, 0)
    assert none["wait"] - totals["wait"] == 5, "what is hidden is taken from the wait"


def test_a_missed_window_is_paid_on_demand() -> None:
    """Layer 1's own first window comes after its activation is needed."""
    job = job_of(Parallel(tp=2), 1, {"activation": "bwd:0:linear_qkv"})
    assert _recomputed(_totals(job, 0)) == (0, 0, 10)


def test_a_collective_inside_a_rebuild_is_exposed() -> None:
    job = job_of(Parallel(tp=2), 1, {"linear_proj": "demand", "self_attn_bda": "demand"})
    assert _recomputed(_totals(job, 0)) == (0, 0, 2 * (10 + 50 + 2))


def test_full_recomputation_repeats_the_whole_forward_with_its_collectives() -> None:
    job = job_of(Parallel(tp=2), 1, dict.fromkeys(FORWARD, "demand"))
    assert _recomputed(_totals(job, 0)) == (0, 0, 2 * (LAYER_FORWARD + 2 * 50))


def test_stall_work_starts_as_soon_as_the_rank_idles() -> None:
    job = job_of(Parallel(pp=2), 1, {"linear_fc1": "stall"}, table=table_of(Parallel(pp=2), ends=False))
    timeline = simulate(job)
    backward = timeline.runs[0][1]
    assert backward.start_ns == timeline.runs[0][0].end_ns == 2 * LAYER_FORWARD
    assert backward.ready_ns - backward.start_ns == 2 * 40
    assert backward.begin_ns == backward.arrival_ns
    assert _recomputed(timeline.totals_ns(0)) == (0, 80, 0)
    there_and_back = LAYER_FORWARD + LAYER_BACKWARD
    assert timeline.stall_ns(0) == 2 * (there_and_back + 40), "the other stage, with what it has dropped"
    assert timeline.stall_ns(1) == 0, "the last stage waits for no gradient"


def test_interleaved_windows_open_for_the_chunk_that_comes_next() -> None:
    """A forward serves the backward that comes next, of whatever chunk: its windows do the work of those
    at the same place of that chunk."""
    parallel = Parallel(tp=2, pp=2, vpp=2)
    job = job_of(parallel, 4, {"core_attention": "fwd:K:linear_fc2"})
    timeline, crossed = simulate(job), 0
    for stage in range(2):
        served = [r for r in timeline.runs[stage] if not r.action.forward and r.partner is not None]
        crossed += sum(run.partner != run.action.chunk for run in served)
        hidden, stall, exposed = _recomputed(timeline.totals_ns(stage))
        assert hidden == len(served) * 2 * 20
        assert hidden + stall + exposed == 8 * 2 * 20
    assert crossed


def _diamond() -> tuple[LayerGraph, CostTable]:
    """One saved storage behind two that are only passed on."""
    graph = LayerGraph(
        regions=(
            Region(name="input"),
            Region(name="a", reads=("x",)),
            Region(name="b", reads=("a.out",)),
            Region(name="c", reads=("a.out", "b.out")),
        ),
        storages=(
            Storage(name="x", producer="input", size_bytes=1, saved_by=("a",)),
            Storage(name="a.out", producer="a", size_bytes=10),
            Storage(name="b.out", producer="b", size_bytes=100),
            Storage(name="c.out", producer="c", size_bytes=1000, saved_by=("c",)),
        ),
    )
    times = {"a": 3, "b": 5, "c": 7}
    return graph, CostTable(layer=LayerCosts(forward_ns=times, dgrad_ns=times, wgrad_ns={}))


@pytest.mark.parametrize(
    ("dropped", "time_ns"), [("c", 7), ("bc", 12), ("abc", 15), ("b", 5), ("ab", 8), ("a", 3)]
)
def test_on_demand_runs_what_is_dropped_and_no_more(dropped: str, time_ns: int) -> None:
    graph, table = _diamond()
    plan = stage_plan(0, ((0,),), dict.fromkeys(dropped, "demand"))
    job = SimJob(stages=(plan,), graph=graph, table=table, parallel=Parallel(), microbatches=1)
    assert _recomputed(_totals(job, 0)) == (0, 0, time_ns)


def _check_streams(timeline: Timeline) -> None:
    for stage in range(len(timeline.runs)):
        at = {"compute": 0, "tp": 0}
        times: Counter[str] = Counter()
        links: list[tuple[int, int]] = []
        for span in timeline.spans(stage):
            assert span.start_ns < span.end_ns
            times[span.kind] += span.duration_ns
            if span.stream == "compute":
                assert span.start_ns == at["compute"], "no gap and no overlap"
            elif span.stream == "tp":
                assert span.start_ns >= at["tp"], "one collective at a time"
            else:
                links.append((span.start_ns, span.end_ns))
                continue
            at[span.stream] = span.end_ns
        assert at["compute"] == timeline.makespan_ns
        assert all(end <= timeline.makespan_ns for _, end in links)
        assert dict(times) == {k: t for k, t in timeline.totals_ns(stage).items() if t}


@settings(max_examples=150)
@given(wild_jobs())
def test_streams_of_any_job_are_sound(job: SimJob) -> None:
    timeline = simulate(job)
    _check_streams(timeline)
    assert 0 <= timeline.bubble() < 1


@settings(max_examples=150)
@given(wild_jobs())
def test_each_dropped_region_is_run_again_once_per_microbatch(job: SimJob) -> None:
    """Whatever the plan says and the windows do: once, and never less than its plain time."""
    timeline = simulate(job)
    costs = job.table.layer
    for stage, plan in enumerate(job.stages):
        again: Counter[tuple[str, int, str]] = Counter()
        for span in timeline.spans(stage):
            if span.kind.startswith("recompute"):
                again[str(span.action)[1:], span.layer, span.name] += span.duration_ns
        dropped = sum(len(layer.dropped) for layer in plan.layers)
        least = {
            (layer.layer, name): costs.forward_ns.get(name, 0)
            for layer in plan.layers
            for name in layer.dropped
        }
        timed: Counter[tuple[int, str]] = Counter()
        for (_, layer_index, name), time_ns in again.items():
            timed[layer_index, name] += time_ns
        assert set(timed) == {key for key, time_ns in least.items() if time_ns}
        for key, time_ns in timed.items():
            assert time_ns >= least[key] * job.microbatches
        assert dropped == len(least)
