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
    has_forward_windows,
    in_flight,
    in_flight_bound,
    in_flight_moments,
    interleaved,
    next_backward,
    one_f_one_b,
    parse_action,
    parse_actions,
    requires,
    schedule,
    serves,
    validate,
    violations,
    waiting_chunks,
    waits_for_gradient,
)
from megatron_lynx.spec import Parallel

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
        assert in_flight_moments(parallel, microbatches, stage) == (alive,)


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
        moments = in_flight_moments(parallel, microbatches, stage)
        best = in_flight(parallel, microbatches, stage, weights)
        held = [sum(n * w for n, w in zip(m, weights, strict=True)) for m in (*moments, best)]
        assert max(held) == held[-1] == peak
        assert in_flight(parallel, microbatches, stage) in moments
        bound = in_flight_bound(parallel, microbatches, stage)
        assert peak <= sum(n * w for n, w in zip(bound, weights, strict=True))


def test_without_a_pipeline_each_backward_follows_its_forward() -> None:
    assert format_actions(one_f_one_b(0, 1, 3)) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"
    assert not has_forward_windows(Parallel(), 3, 0)


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
    assert not has_forward_windows(Parallel(pp=4), 8, 3)
    assert has_forward_windows(Parallel(pp=4), 8, 2)
    assert not has_forward_windows(Parallel(pp=4), 1, 0)
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
    assert waiting_chunks(3, 4, 2) == (0,)
    assert waiting_chunks(0, 4, 2) == (0, 1)
    assert waiting_chunks(0, 2, 1) == (0,)
    assert waiting_chunks(1, 2, 1) == waiting_chunks(0, 1, 1) == ()


def test_a_deadlock_is_marked() -> None:
    broken = [parse_actions("F0.0 B0.0 F1.0 B1.0"), parse_actions("F1.0 B1.0 F0.0 B0.0")]
    with pytest.raises(ValueError) as caught:
        validate(broken, 1, 2)
    assert "stage 0: F0.0 [B0.0] F1.0 B1.0  <-- B0.0 waits for ever for B0.0 of stage 1" in str(caught.value)


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
