"""Schedules: orders, dependency rule, in-flight counts, goldens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.errors import ConfigError
from megatron_lynx.schedule import (
    Action,
    actions,
    backward_order,
    format_actions,
    in_flight,
    interleaved,
    next_backward,
    one_f_one_b,
    parse_action,
    parse_actions,
    requires,
    schedule,
    serves,
    turns,
    waits_for_gradient,
)
from megatron_lynx.spec import Parallel
from tests.support.schedules import violations

GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Parallel, int]:
    """Parallel sizes and a number of microbatches that Megatron accepts."""
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    if pp == 1 or vpp == 1:
        return Parallel(pp=pp), draw(st.integers(1, 16))
    group = draw(st.integers(pp, pp + 3))
    rest = draw(st.sampled_from([0, *range(pp, group)]))
    return Parallel(pp=pp, vpp=vpp, microbatch_group_size=group), group * draw(st.integers(1, 4)) + rest


@given(st.sampled_from("FB"), st.integers(0, 999), st.integers(0, 15))
def test_action_text_reads_back(kind: str, microbatch: int, chunk: int) -> None:
    action = Action("F" if kind == "F" else "B", microbatch, chunk)
    assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "F1", "G1.0", "F1.0 ", "f1.0", "B-1.0"])
def test_bad_action_text(text: str) -> None:
    with pytest.raises(ValueError, match="not of the form"):
        parse_action(text)


@given(jobs())
def test_every_schedule_runs(job: tuple[Parallel, int]) -> None:
    parallel, microbatches = job
    order = schedule(parallel, microbatches)
    assert violations(order, parallel.vpp, microbatches) == ()
    for one in order:
        assert parse_actions(format_actions(one)) == one
        assert len(backward_order(one)) == microbatches * parallel.vpp


@given(jobs())
def test_backwards_of_a_chunk_are_first_in_first_out(job: tuple[Parallel, int]) -> None:
    parallel, microbatches = job
    for order in schedule(parallel, microbatches):
        for chunk in range(parallel.vpp):
            done = [b.microbatch for b in backward_order(order) if b.chunk == chunk]
            assert done == list(range(microbatches))


@given(st.integers(1, 8), st.integers(1, 20))
def test_one_f_one_b_in_flight_is_min_m_p_minus_stage(stages: int, microbatches: int) -> None:
    parallel = Parallel(pp=stages)
    for stage in range(stages):
        alive = (min(microbatches, stages - stage),)
        assert in_flight(parallel, microbatches, stage) == alive
        assert [turn.moments for turn in turns(parallel, microbatches, stage)] == [(alive,)]


@given(jobs(), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_moments_hold_the_peak_for_any_weights(job: tuple[Parallel, int], drawn: list[int]) -> None:
    parallel, microbatches = job
    weights = tuple(drawn[: parallel.vpp])
    for stage in range(parallel.pp):
        alive = [0] * parallel.vpp
        peak = 0
        for action in actions(parallel, microbatches, stage):
            alive[action.chunk] += 1 if action.forward else -1
            peak = max(peak, sum(n * w for n, w in zip(alive, weights, strict=True)))
        best = in_flight(parallel, microbatches, stage, weights)
        found = [turn.moments for turn in turns(parallel, microbatches, stage)]
        held = [sum(n * w for n, w in zip(m, weights, strict=True)) for ms in found for m in (*ms, best)]
        assert max(held) == held[-1] == peak
        assert any(in_flight(parallel, microbatches, stage) in moments for moments in found)
        for chunk, moments in enumerate(found):
            assert all(moment[chunk] for moment in moments), "a chunk in its backward is alive itself"


@given(jobs())
def test_turns_cover_every_backward(job: tuple[Parallel, int]) -> None:
    """At each backward no more is alive than some moment of its chunk's turn says; a chunk counts as
    served if at each of these moments a forward serves it."""
    parallel, microbatches = job
    for stage in range(parallel.pp):
        order, found = actions(parallel, microbatches, stage), turns(parallel, microbatches, stage)
        alive = [0] * parallel.vpp
        served: list[set[tuple[int, ...]]] = [set() for _ in range(parallel.vpp)]
        for position, action in enumerate(order):
            if action.forward:
                alive[action.chunk] += 1
                continue
            moments = found[action.chunk].moments
            assert any(all(a <= b for a, b in zip(alive, moment, strict=True)) for moment in moments)
            if position and serves(order, position - 1) is not None:
                served[action.chunk].add(tuple(alive))
            waits = waits_for_gradient(action, stage, parallel.pp, parallel.vpp)
            assert waits == found[action.chunk].waits
            alive[action.chunk] -= 1
        for turn, seen in zip(found, served, strict=True):
            assert turn.served == (set(turn.moments) <= seen)


def test_without_a_pipeline_each_backward_follows_its_forward() -> None:
    assert format_actions(one_f_one_b(0, 1, 3)) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"
    assert not turns(Parallel(), 3, 0)[0].served


def test_windows_serve_the_oldest_outstanding_microbatch() -> None:
    order = one_f_one_b(1, 4, 6)
    pairs = {order[i]: served for i in range(len(order)) if (served := serves(order, i))}
    assert {str(f): str(b) for f, b in pairs.items()} == {
        "F2.0": "B0.0",
        "F3.0": "B1.0",
        "F4.0": "B2.0",
        "F5.0": "B3.0",
    }
    assert next_backward(order, 0) == Action("B", 0)
    assert next_backward(order, len(order) - 1) is None


def test_last_stage_has_no_forward_windows_but_its_early_chunks_do() -> None:
    assert not turns(Parallel(pp=4), 8, 3)[0].served
    assert turns(Parallel(pp=4), 8, 2)[0].served
    assert not turns(Parallel(pp=4), 1, 0)[0].served
    assert [turn.served for turn in turns(Parallel(pp=2, vpp=2), 8, 1)] == [True, False]
    last = interleaved(1, 2, 2, 4, 2)
    served = {str(last[i]): str(b) for i in range(len(last)) if (b := serves(last, i))}
    assert served == {"F2.0": "B0.0", "F3.0": "B1.0"}


def test_dependencies_cross_stages_and_chunks() -> None:
    assert requires(Action("F", 2, 0), 0, 4, 2) == ()
    assert requires(Action("F", 2, 1), 0, 4, 2) == ((3, Action("F", 2, 0)),)
    assert requires(Action("B", 2, 0), 3, 4, 2) == ((3, Action("F", 2, 0)), (0, Action("B", 2, 1)))
    assert requires(Action("B", 2, 1), 3, 4, 2) == ((3, Action("F", 2, 1)),)
    assert waits_for_gradient(Action("B", 2, 0), 3, 4, 2)
    assert not waits_for_gradient(Action("B", 2, 1), 3, 4, 2)
    assert not waits_for_gradient(Action("B", 0, 0), 0, 1, 1)


def test_a_deadlock_is_found() -> None:
    broken = [parse_actions("F0.0 B0.0 F1.0 B1.0"), parse_actions("F1.0 B1.0 F0.0 B0.0")]
    stuck = [(v.stage, v.position, v.reason) for v in violations(broken, 1, 2)]
    assert stuck[0] == (0, 1, "waits for ever for B0.0 of stage 1")


def test_missing_double_and_foreign_actions_are_found() -> None:
    found = violations([parse_actions("F0.0 F0.0 B0.0 B7.0")], 1, 2)
    assert {(str(v.action), v.reason) for v in found} == {
        ("F0.0", "runs twice"),
        ("B7.0", "is foreign"),
        ("F1.0", "is missing"),
        ("B1.0", "is missing"),
        ("B7.0", "waits for ever for F7.0 of stage 0"),
    }


@pytest.mark.parametrize(
    ("stages", "microbatches", "group"), [(4, 3, 4), (4, 8, 3), (4, 9, 8), (2, 5, 2), (2, 4, 0)]
)
def test_what_megatron_refuses_is_refused(stages: int, microbatches: int, group: int) -> None:
    with pytest.raises(ConfigError, match="work"):
        interleaved(0, stages, 2, microbatches, group)


@pytest.mark.parametrize(
    ("name", "parallel", "microbatches"),
    [
        ("pp1_m3", Parallel(), 3),
        ("pp4_m8", Parallel(pp=4), 8),
        ("pp4_m2", Parallel(pp=4), 2),
        ("pp2_vpp2_m4", Parallel(pp=2, vpp=2), 4),
        ("pp4_vpp3_m8", Parallel(pp=4, vpp=3), 8),
        ("pp2_vpp2_m7_group5", Parallel(pp=2, vpp=2, microbatch_group_size=5), 7),
    ],
)
def test_schedules_equal_their_goldens(name: str, parallel: Parallel, microbatches: int) -> None:
    lines = [
        f"stage {stage} in-flight {','.join(map(str, in_flight(parallel, microbatches, stage)))}: "
        + format_actions(actions(parallel, microbatches, stage))
        for stage in range(parallel.pp)
    ]
    assert "\n".join(lines) + "\n" == (GOLDEN / f"{name}.txt").read_text()
