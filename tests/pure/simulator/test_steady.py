"""Rounds that repeat: a step that skips them is the same step, and no step is shorter than its floor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx import schedule
from megatron_lynx.errors import ConfigError
from megatron_lynx.simulator.engine import SimStage, iteration_ns, play, program, stalls_ns, step_of
from megatron_lynx.simulator.floor import floor_ns, rank_times
from megatron_lynx.spec import Parallel
from tests.support.schedules import violations


@st.composite
def steps(draw: st.DrawFn) -> tuple[Parallel, int]:
    """Parallel sizes and microbatches that Megatron accepts, up to many rounds."""
    pp = draw(st.integers(1, 5))
    vpp = 1 if pp == 1 else draw(st.integers(1, 3))
    group = draw(st.sampled_from([None, pp, pp + 1, 2 * pp])) if vpp > 1 else None
    parallel = Parallel(pp=pp, vpp=vpp, microbatch_group_size=group)
    microbatches = draw(st.integers(1, 70))
    if vpp > 1:
        size = parallel.group_size
        rest = microbatches % size
        microbatches = max(size, microbatches - rest if 0 < rest < pp else microbatches)
    return parallel, microbatches


@st.composite
def timed(draw: st.DrawFn) -> tuple[Parallel, int, list[SimStage], int]:
    """Such a step with times: alike or not, so that rounds repeat at once, later, in groups or never."""
    parallel, microbatches = draw(steps())
    most = draw(st.sampled_from([3, 100, 10**6]))
    width = 2 * parallel.vpp * (parallel.vpp + 1)
    base = draw(st.lists(st.integers(0, most), min_size=width, max_size=width))
    apart = draw(st.sampled_from([0, 2, most]))
    stages = []
    for _ in range(parallel.pp):
        body = tuple(t + draw(st.integers(0, apart)) for t in base)
        early = (0,) * (width // 2) + (draw(st.sampled_from([0, 1, most])),) * (width // 2)
        stages.append(SimStage(early_ns=early, body_ns=body))
    return parallel, microbatches, stages, draw(st.sampled_from([0, 1, most]))


@given(steps())
def test_a_program_with_rounds_is_the_schedule(step: tuple[Parallel, int]) -> None:
    """Written out, it is each rank's order, every op after what it requires, and reaches one round back."""
    parallel, microbatches = step
    prog = program(parallel, microbatches)
    orders: list[list[schedule.Action]] = [[] for _ in range(parallel.pp)]
    places: dict[tuple[int, schedule.Action], int] = {}
    for place, (op, action) in enumerate(zip(prog.ops, prog.actions, strict=True)):
        needs = schedule.requires(action, op.rank, parallel.pp, parallel.vpp)
        assert all(need in places for need in needs)
        assert [place - places[need] for need in needs if need[0] != op.rank] == [op.back] * bool(op.back)
        orders[op.rank].append(action)
        places[op.rank, action] = place
    assert [tuple(order) for order in orders] == list(schedule.schedule(parallel, microbatches))
    assert violations(orders, parallel.vpp, microbatches) == ()
    size = len(prog.body)
    assert all(op.back <= size + place for part in (prog.body, prog.tail) for place, op in enumerate(part))


@given(timed())
def test_a_step_that_skips_rounds_is_the_same_step(case: tuple[Parallel, int, list[SimStage], int]) -> None:
    parallel, microbatches, stages, p2p = case
    prog = program(parallel, microbatches)
    whole, step = play(prog, stages, p2p), step_of(prog, stages, p2p)
    assert step.makespan_ns == whole.makespan_ns == iteration_ns(stages, parallel, microbatches, p2p)
    waits = [whole.stall_ns(stage) for stage in range(parallel.pp)]
    assert [step.stall_ns(stage) for stage in range(parallel.pp)] == waits
    assert list(stalls_ns(stages, parallel, microbatches, p2p)) == waits


def test_a_step_of_very_many_microbatches_runs_few_rounds() -> None:
    """Also where a rank that is a nanosecond slower overtakes another only after thousands of rounds."""
    for extra in (0, 1):
        stages = [
            SimStage.of([1000], [2000]),
            SimStage.of([1000], [2000 + extra]),
            SimStage.of([900], [2100]),
        ]
        prog = program(Parallel(pp=3), 100_000)
        step = step_of(prog, stages, 77)
        assert prog.rounds - step.skipped < 100
        assert step.makespan_ns == play(prog, stages, 77).makespan_ns


@given(timed())
def test_no_step_is_shorter_than_its_floor(case: tuple[Parallel, int, list[SimStage], int]) -> None:
    parallel, microbatches, stages, p2p = case
    ranks = [rank_times(s.early_ns, s.body_ns, parallel, microbatches, r) for r, s in enumerate(stages)]
    assert floor_ns(ranks, parallel, p2p) <= iteration_ns(stages, parallel, microbatches, p2p)


@given(steps(), st.data())
def test_what_is_alive_does_not_depend_on_rounds(step: tuple[Parallel, int], data: st.DataObject) -> None:
    """Turns and microbatches in flight are those of the whole order."""
    parallel, microbatches = step
    stage = data.draw(st.integers(0, parallel.pp - 1))
    order = schedule.actions(parallel, microbatches, stage)
    alive, seen = [0] * parallel.vpp, [set[tuple[int, ...]]() for _ in range(parallel.vpp)]
    most = 0
    for action in order:
        alive[action.chunk] += action.forward
        most = max(most, sum(alive))
        if not action.forward:
            seen[action.chunk].add(tuple(alive))
        alive[action.chunk] -= not action.forward
    assert sum(schedule.in_flight(parallel, microbatches, stage)) == most
    for chunk, turn in enumerate(schedule.turns(parallel, microbatches, stage)):
        assert set(turn.moments) <= seen[chunk]
        assert all(
            any(all(a <= b for a, b in zip(one, moment, strict=True)) for moment in turn.moments)
            for one in seen[chunk]
        )


@given(steps())
def test_checking_microbatches_is_what_the_schedule_refuses(step: tuple[Parallel, int]) -> None:
    parallel, microbatches = step
    for count in range(max(1, microbatches - 3), microbatches + 3):
        refused = []
        for check in (
            lambda n: schedule.check_microbatches(parallel, n),
            lambda n: schedule.schedule(parallel, n),
        ):
            try:
                check(count)
                refused.append("")
            except ConfigError as error:
                refused.append(str(error))
        assert refused[0] == refused[1]
