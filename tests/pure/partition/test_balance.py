"""Partitions: sums, contiguity, and greedy and search against brute force under the same scorer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.errors import ConfigError, InfeasibleError, LynxError
from megatron_lynx.partition.balance import Evaluations, Partition, even, greedy, search
from megatron_lynx.partition.layout import parse_layout
from megatron_lynx.partition.seeds import bottleneck, spread, summed
from megatron_lynx.simulator.engine import SimStage, iteration_ns
from megatron_lynx.spec import Parallel


@pytest.mark.parametrize("layers", range(1, 129))
def test_even_splits_are_whole_contiguous_and_leave_nobody_out(layers: int) -> None:
    for pp in range(1, layers + 1):
        vpps = (1, 2, 3, 4) if pp > 1 else (1,)
        for vpp in vpps:
            if pp * vpp > layers:
                break
            split = even(layers, pp, vpp)
            assert sum(split.layers) == layers
            assert len(split.layers) == pp * vpp
            assert min(split.layers) >= 1
            assert max(split.layers) - min(split.layers) <= 1
            if layers % (pp * vpp) == 0:
                assert len(set(split.layers)) == 1, "Megatron's own"


@given(st.integers(1, 128), st.data())
def test_layers_are_contiguous_and_the_layout_says_so(layers: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, layers))
    split = even(layers, pp)
    chunks = [split.chunks(rank) for rank in range(pp)]
    assert [layer for rank in chunks for chunk in rank for layer in chunk] == list(range(layers))
    assert parse_layout(str(split.layout), pp).counts == split.layers


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--num-layers 3 leaves"):
        even(3, 4)
    with pytest.raises(ConfigError, match="--num-layers 7 leaves"):
        even(7, 4, 2)
    with pytest.raises(ConfigError, match="--pp 3 works"):
        Partition(pp=2, layers=(1, 1, 1))


@dataclass
class Toy:
    """Ranks with random layer times, ends and memory; a layer costs more where memory is short."""

    parallel: Parallel
    layers: int
    microbatches: int
    times: list[int]
    ends: list[int]
    room: list[list[int]]
    p2p: int
    calls: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def plan_stage(self, rank: int, layers: tuple[int, ...]) -> SimStage | None:
        self.calls.append((rank, layers))
        used = sum(n * weight for n, weight in zip(layers, self.room[rank][1:], strict=True))
        if used > self.room[rank][0]:
            return None
        again = self.times[rank] if 2 * used > self.room[rank][0] else 0
        forward = [n * self.times[rank] for n in layers]
        backward = [n * (2 * self.times[rank] + again // 2) for n in layers]
        forward[0] += self.ends[0] if rank == 0 else 0
        if rank == self.parallel.pp - 1:
            forward[-1] += self.ends[1]
            backward[-1] += 2 * self.ends[1]
        return SimStage.of(forward, backward)

    def score(self, stages: Sequence[SimStage]) -> int:
        return iteration_ns(stages, self.parallel, self.microbatches, self.p2p)

    def evaluations(self) -> Evaluations[SimStage]:
        return Evaluations(self.plan_stage, self.score, lambda stage: stage.period_ns)


@st.composite
def toys(draw: st.DrawFn, most: int = 9) -> Toy:
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2)]))
    layers = draw(st.integers(pp * vpp, max(most, pp * vpp)))
    tight = draw(st.integers(1, 3))
    room = [
        [draw(st.integers(tight * layers // pp, 2 * tight * layers))]
        + [draw(st.integers(1, tight)) for _ in range(vpp)]
        for _ in range(pp)
    ]
    return Toy(
        parallel=Parallel(pp=pp, vpp=vpp),
        layers=layers,
        microbatches=pp * draw(st.integers(1, 3)),
        times=[draw(st.integers(1, 9)) for _ in range(pp)],
        ends=[draw(st.integers(0, 20)), draw(st.integers(0, 40))],
        room=room,
        p2p=draw(st.integers(0, 5)),
    )


def _all(toy: Toy) -> Iterator[Partition]:
    stages = toy.parallel.pp * toy.parallel.vpp
    for counts in product(range(1, toy.layers + 1), repeat=stages - 1):
        rest = toy.layers - sum(counts)
        if rest >= 1:
            yield Partition(pp=toy.parallel.pp, layers=(*counts, rest))


@settings(max_examples=200)
@given(toys())
def test_search_finds_a_split_whenever_one_fits(toy: Toy) -> None:
    """And it is never worse than greedy, which is never worse than the even split."""
    args = (toy.layers, toy.parallel.pp, toy.parallel.vpp)
    best = min(
        (b.iteration_ns for p in _all(toy) if (b := toy.evaluations().balance(p)) is not None), default=None
    )
    if best is None:
        with pytest.raises(LynxError, match="no split"):
            search(*args, toy.evaluations(), toy.microbatches)
        return
    found = search(*args, toy.evaluations(), toy.microbatches)
    assert best <= found.iteration_ns
    assert sum(found.partition.layers) == toy.layers
    assert min(found.partition.layers) >= 1
    start = toy.evaluations().balance(even(*args))
    if start is None:
        with pytest.raises(LynxError):
            greedy(even(*args), toy.evaluations())
    else:
        walked = greedy(even(*args), toy.evaluations())
        assert found.iteration_ns <= walked.iteration_ns <= start.iteration_ns


def test_search_is_close_to_the_optimum_on_small_pipelines() -> None:
    """On 60 fixed cases brute force is better in few, and never by much."""
    worse = []
    for seed in range(60):
        toy = Toy(
            parallel=Parallel(pp=3 + seed % 2),
            layers=8 + seed % 3,
            microbatches=12,
            times=[3 + (seed * k) % 4 for k in (1, 3, 5, 7)][: 3 + seed % 2],
            ends=[seed % 11, (7 * seed) % 25],
            room=[[10_000, 1]] * (3 + seed % 2),
            p2p=seed % 3,
        )
        found = search(toy.layers, toy.parallel.pp, 1, toy.evaluations(), toy.microbatches)
        evaluations = toy.evaluations()
        best = min(b.iteration_ns for p in _all(toy) if (b := evaluations.balance(p)) is not None)
        if found.iteration_ns > best:
            worse.append(found.iteration_ns / best)
    assert len(worse) <= 6
    assert max(worse, default=1.0) <= 1.03


def test_each_stage_is_planned_once() -> None:
    toy = Toy(Parallel(pp=4), 16, 16, [3, 3, 3, 4], [5, 20], [[100, 1]] * 4, 1)
    found = search(16, 4, 1, toy.evaluations(), 16)
    assert len(toy.calls) == len(set(toy.calls))
    assert found.planned <= len(toy.calls)
    assert found.partition.layers[-1] < 4, "the head makes the last stage lighter"


def test_what_does_not_fit_is_not_tried_with_more_layers() -> None:
    toy = Toy(Parallel(pp=2), 40, 4, [1, 1], [0, 0], [[12, 1], [12, 1]], 0)
    with pytest.raises(LynxError):
        search(40, 2, 1, toy.evaluations(), 4)
    assert sum(1 for _, layers in toy.calls if layers[0] > 12) <= 16


def test_the_reason_that_lacks_least_is_raised() -> None:
    def plan_stage(rank: int, layers: tuple[int, ...]) -> SimStage | None:
        raise InfeasibleError(
            f"rank {rank} with {layers}", stage=rank, budget_bytes=10, needed_bytes=10 + sum(layers) + rank
        )

    evaluations = Evaluations(plan_stage, lambda stages: 0, lambda stage: stage.period_ns)
    with pytest.raises(InfeasibleError) as caught:
        search(4, 2, 1, evaluations, 4)
    assert caught.value.needed_bytes == 11


def test_a_whole_split_can_be_planned_at_once() -> None:
    """Plans that depend on other ranks come from ``whole``; the table only gives seeds."""
    toy = Toy(Parallel(pp=2), 6, 4, [2, 3], [0, 0], [[100, 1]] * 2, 0)
    asked: list[tuple[int, ...]] = []

    def whole(partition: Partition) -> list[SimStage]:
        asked.append(partition.layers)
        if partition.layers == (3, 3):
            raise InfeasibleError("not this one", stage=1, budget_bytes=1, needed_bytes=2)
        stages = [toy.plan_stage(rank, partition.on(rank)) for rank in range(2)]
        return [stage for stage in stages if stage is not None]

    found = search(6, 2, 1, Evaluations(toy.plan_stage, toy.score, lambda s: s.period_ns, whole), 4)
    assert found.partition.layers == (4, 2)
    assert (3, 3) in asked


@given(st.lists(st.dictionaries(st.integers(1, 6), st.integers(0, 50), max_size=6), min_size=1, max_size=4),
       st.integers(1, 16), st.integers(1, 20))  # fmt: skip
def test_dynamic_programs_are_exact(periods: list[dict[int, int]], total: int, microbatches: int) -> None:
    every = [ranks for ranks in product(*periods) if sum(ranks) == total]
    longest = bottleneck(periods, total)
    least = summed(periods, total, microbatches)
    if not every:
        assert longest is None
        assert least is None
        return

    def times(ranks: Sequence[int]) -> list[int]:
        return [table[n] for table, n in zip(periods, ranks, strict=True)]

    assert longest is not None
    assert least is not None
    assert max(times(longest)) == min(max(times(ranks)) for ranks in every)

    def value(ranks: Sequence[int]) -> int:
        return (microbatches - 1) * max(times(ranks)) + sum(times(ranks))

    assert value(least) == min(map(value, every))


@given(st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_shares_of_a_rank_are_complete(layers: int, chunks: int, last: bool) -> None:
    shares = list(spread(layers, chunks, last=last, unequal=True))
    wanted = {s for s in product(range(1, layers + 1), repeat=chunks) if sum(s) == layers}
    assert len(shares) == len(set(shares))
    assert set(shares) == wanted
    if shares:
        assert max(shares[0]) - min(shares[0]) <= 1
