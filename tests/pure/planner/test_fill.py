"""The stall is filled after planning: what fits memory and may be moved, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.plan import DEMAND, LayerPlan, StagePlan, Window, parse_choice
from megatron_lynx.planner import PlannedStage, SolveOptions, StageProblem, plan, verify
from megatron_lynx.planner.fill import STALL, fill_stall, filled
from megatron_lynx.planner.price import Pricer
from megatron_lynx.schedule import Turn
from megatron_lynx.search.pools import aligned, pick
from tests.support.strategies import stage_problems
from tests.support.toy import toy_problem, with_budget

ALL = "norm=demand gemm=demand attn=demand mask=demand add=demand"
ALL_MOVED = ALL.replace("demand", "stall")


def stage(problem: StageProblem, *layers: str) -> StagePlan:
    """A plan from the text of each layer's choices."""
    made = []
    for layer, text in zip(problem.layers, layers, strict=True):
        choices = (pair.split("=") for pair in text.split())
        made.append(LayerPlan(layer=layer, choices=tuple((n, parse_choice(c)) for n, c in choices)))
    return StagePlan(stage=problem.stage, chunks=problem.chunks, layers=tuple(made))


def texts(made: StagePlan) -> list[str]:
    """The inverse of ``stage``."""
    return [" ".join(f"{n}={c}" for n, c in layer.choices) for layer in made.layers]


def planned_by_hand(problem: StageProblem, *layers: str) -> PlannedStage:
    """As if a planner had answered with this plan."""
    made, base = stage(problem, *layers), plan(replace(problem, budget_bytes=1 << 40), "none")
    price = Pricer(problem).price(made)
    report = replace(base.report, exposed_ns=price.exposed_ns, bound_ns=None)
    return PlannedStage(plan=made, report=report, graph=problem.graph)


TOY = replace(toy_problem(), has_stall=True)
"""Two layers, three microbatches in flight, no stall in the steady state. A layer on demand keeps 20
bytes (the input, and what ``add`` reads of ``proj``), and 105 appear when it runs again: of them 30 only
pass on to ``attn``. It takes 100 ns."""

LOWEST = 3 * 40 + 105 + 20
"""What everything on demand takes: all that is kept, one layer's rebuilt storages, the workspace."""


@pytest.mark.parametrize(
    ("budget", "first_layer"),
    [
        # Of the last layer everything is rebuilt early; that is at most 3 * 40 + 105 = 225 bytes.
        (LOWEST, "norm=stall gemm=demand attn=demand mask=stall add=demand"),  # 225 + 10 + 5, 10 too many
        (LOWEST + 5, "norm=stall gemm=demand attn=demand mask=stall add=stall"),
        (225 + 10 + 80, "norm=stall gemm=stall attn=stall mask=demand add=demand"),
        (225 + 104, "norm=stall gemm=stall attn=stall mask=stall add=demand"),
        (225 + 105, ALL_MOVED),
        (10**6, ALL_MOVED),
    ],
)
def test_as_much_is_moved_as_fits(budget: int, first_layer: str) -> None:
    problem = with_budget(TOY, budget)
    before = planned_by_hand(problem, ALL, ALL)
    after = filled(problem, before)
    assert texts(after.plan) == [first_layer, ALL_MOVED]
    assert after.filled
    assert verify(problem, after.plan, soft=True) == ()
    assert LOWEST - 20 <= after.report.peak_bytes <= budget
    assert after.report.exposed_ns == before.report.exposed_ns == 2 * 100, "no stall in the steady state"
    assert after.report.hidden_ns == 0
    assert [fault.kind for fault in verify(problem, after.plan)] == ["overfull"]


def test_a_stall_of_the_steady_state_hides_what_it_is_long() -> None:
    problem = replace(TOY, stall_ns=40)
    report = filled(problem, planned_by_hand(problem, ALL, ALL)).report
    assert (report.exposed_ns, report.hidden_ns) == (2 * 100 - 40, 40)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # What no backward reads goes with its reader alone, and not at all without one.
        ("gemm=demand", "gemm=demand"),
        ("gemm=demand attn=demand", "gemm=stall attn=stall"),
        ("gemm=demand attn=stall", "gemm=demand attn=stall"),
        # A forward window comes before the stall, a window of the backward after it.
        ("gemm=fwd:0:proj attn=demand", "gemm=fwd:0:proj attn=stall"),
        ("gemm=bwd:1:mlp attn=demand", "gemm=bwd:1:mlp attn=demand"),
        ("norm=demand gemm=bwd:1:mlp attn=demand", "norm=stall gemm=bwd:1:mlp attn=demand"),
        # A collective stays, with what runs again from it.
        ("attn=demand proj=demand add=demand", "attn=stall proj=demand add=demand"),
        # So does what nobody needs: the end of a layer in Megatron's full recomputation.
        ("mask=demand mlp=demand", "mask=stall mlp=demand"),
    ],
)
def test_what_may_be_moved(before: str, after: str) -> None:
    assert texts(fill_stall(TOY, stage(TOY, before, ""))) == [after, ""]


def test_full_recomputation_keeps_its_collectives_and_its_end() -> None:
    one = plan(TOY, "full-uniform-1").plan
    moved = (
        ALL.replace("demand", "stall").replace("mask", "proj=demand mask").replace("add=stall", "add=demand")
    )
    assert texts(fill_stall(TOY, one)) == [f"{moved} mlp=demand"] * 2
    two = plan(TOY, "full-uniform-2")
    assert any(INPUT in layer.dropped for layer in two.plan.layers)
    assert filled(TOY, two) is two


def test_without_a_stall_nothing_is_moved_where_nothing_may() -> None:
    kept = plan(TOY, "none")
    assert filled(TOY, kept) is kept
    (fault,) = verify(toy_problem(layers=1), stage(toy_problem(layers=1), "norm=stall"), soft=True)
    assert (fault.kind, fault.point) == ("unknown", "stall")


def two_chunks(*moments: tuple[int, ...], waits: tuple[bool, bool] = (True, True)) -> StageProblem:
    """Four toy layers in two model chunks."""
    found = tuple(Turn(moments=moments, waits=waiting) for waiting in waits)
    return replace(TOY, chunks=((0, 1), (2, 3)), turns=found)


def test_only_chunks_that_wait_are_filled() -> None:
    both = stage(two_chunks((1, 1)), *[ALL] * 4)
    first, second = two_chunks((1, 1), waits=(True, False)), two_chunks((1, 1), waits=(False, True))
    assert texts(fill_stall(first, both)) == [ALL_MOVED, ALL_MOVED, ALL, ALL]
    assert texts(fill_stall(second, both)) == [ALL, ALL, ALL_MOVED, ALL_MOVED]
    none = two_chunks((1, 1), waits=(False, False))
    assert filled(none, planned_by_hand(none, *[ALL] * 4)).plan == both


def test_memory_is_kept_to_at_every_moment() -> None:
    moments = ((1, 1), (2, 1))
    before = planned_by_hand(two_chunks((1, 1)), *[ALL] * 4)
    full = stage(two_chunks((1, 1)), *[ALL_MOVED] * 4)
    low, high = (Pricer(two_chunks(moment)).price(full).peak_bytes for moment in moments)
    assert high > low
    assert filled(with_budget(two_chunks((1, 1)), low), before).plan == full
    tight = with_budget(two_chunks(*moments), low)
    less = filled(tight, before)
    assert before.plan != less.plan != full
    assert verify(tight, less.plan, soft=True) == ()
    enough = filled(with_budget(two_chunks(*moments), high), before)
    assert enough.plan == full
    assert enough.report.peak_bytes == high


def test_a_bound_that_is_beaten_is_dropped() -> None:
    """The planner's best within a stall of 40 ns exposes more than a plan that overruns it."""
    problem = with_budget(replace(TOY, stall_ns=40), 350)
    before = planned_by_hand(problem, ALL, ALL)
    exposed = before.report.exposed_ns
    for bound, status in ((exposed, "heuristic"), (exposed - 40, "optimal"), (exposed - 60, "optimal")):
        report = replace(before.report, bound_ns=bound, status="optimal")
        found = filled(problem, replace(before, report=report)).report
        assert found.exposed_ns == exposed - 40
        assert found.status == status
        assert found.bound_ns == (None if bound == exposed else bound)
        assert found.gap == (max(0, found.exposed_ns - bound) / found.exposed_ns)


def test_at_equal_time_the_plan_is_taken_that_is_not_filled() -> None:
    plain = planned_by_hand(TOY, ALL, ALL)
    full = filled(replace(TOY, stall_ns=40), plain)
    assert full.report.exposed_ns < plain.report.exposed_ns
    pools = [[full, plain], [plain]]
    assert pick(pools, aligned(pools), lambda stages: 0) == (plain, plain)
    assert pick(pools, aligned(pools), lambda stages: 9 - stages[0].filled) == (full, plain)
    assert pick(pools, [[plain, plain]], lambda stages: 9 - stages[0].filled) == (full, plain)


# Random stages ----------------------------------------------------------------------------------

PLANNERS = (
    "checkmate",
    "tail-free",
    "windows",
    "heu",
    "opt",
    "full-uniform-1",
    "full-uniform-2",
    "full-block-1",
)


def moved(before: StagePlan, after: StagePlan) -> list[tuple[int, str]]:
    """The (layer, region) pairs that were moved; nothing else may have changed."""
    found = []
    for old, new in zip(before.layers, after.layers, strict=True):
        assert old.layer == new.layer
        for (name, was), (same, now) in zip(old.choices, new.choices, strict=True):
            assert name == same
            if was != now:
                assert (was, now) == (DEMAND, STALL)
                found.append((old.layer, name))
    return found


def stuck(graph: LayerGraph, layer: LayerPlan, name: str) -> bool:
    """Whether ``name`` must stay on demand: a collective, or what reads one, or a later window."""
    choice = layer.choice(name)
    if isinstance(choice, Window):
        return choice.kind in ("bwd", "head")
    sources = graph.inputs_of(name)
    return choice == DEMAND and (
        graph.region(name).communicates or any(stuck(graph, layer, source) for source in sources)
    )


@pytest.mark.parametrize("name", PLANNERS)
def test_a_filled_plan_keeps_every_rule(name: str) -> None:
    count = 0

    @settings(max_examples=25 if name == "opt" else 80)
    @given(stage_problems(most_layers=3, most_plans=10**9), st.booleans())
    def hold(problem: StageProblem, soft: bool) -> None:
        nonlocal count
        try:
            before = plan(problem, name, SolveOptions(soft=soft))
        except InfeasibleError:
            return
        problem = replace(problem, has_stall=True)
        after = filled(problem, before)
        pairs = moved(before.plan, after.plan)
        count += len(pairs)
        assert after.filled == bool(pairs)
        assert verify(problem, after.plan, soft=True) == ()
        assert after.report.peak_bytes <= problem.budget_bytes
        assert after.report.exposed_ns <= before.report.exposed_ns
        assert after.report.kept_bytes == before.report.kept_bytes
        check_purpose(problem.graph, after.plan, pairs)
        waiting = tuple(replace(turn, waits=True) for turn in problem.turns)
        roomy = fill_stall(replace(problem, turns=waiting, budget_bytes=1 << 40), before.plan)
        if all(INPUT not in layer.dropped for layer in roomy.layers):
            check_complete(problem.graph, roomy)

    hold()
    assert count > 0 or name == "full-uniform-2", "nothing was ever moved"


def check_purpose(graph: LayerGraph, made: StagePlan, pairs: Sequence[tuple[int, str]]) -> None:
    """What was moved serves a backward: by itself, or a region in the stall that runs again from it."""
    for layer, name in pairs:
        saved = any(storage.saved_by for storage in graph.produced_by(name))
        readers = {r for storage in graph.produced_by(name) for r in graph.readers(storage.name)}
        assert saved or any(made.layer(layer).choice(reader) == STALL for reader in readers)


def check_complete(graph: LayerGraph, made: StagePlan) -> None:
    """With room for everything, what some backward reads is on demand only if it must be."""
    for layer in made.layers:
        for name, choice in layer.choices:
            if choice == DEMAND and any(storage.saved_by for storage in graph.produced_by(name)):
                assert stuck(graph, layer, name)
