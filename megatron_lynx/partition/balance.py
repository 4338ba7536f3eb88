"""Which stage gets how many layers: Megatron's even split, the paper's greedy one, and a search.

Nothing here knows a planner or a simulator. ``plan_stage(rank, layers)`` plans one rank that holds
``layers[c]`` layers in chunk ``c`` and answers None (or raises InfeasibleError) if they do not fit;
``score`` gives the time of a step from the answers of all ranks; ``period`` the time that one
microbatch takes on a rank, for seeds and for telling the slowest rank from the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron_lynx.errors import ConfigError, InfeasibleError, LynxError
from megatron_lynx.partition.layout import Layout, chunks_of
from megatron_lynx.partition.seeds import Table, bottleneck, spread, summed

C = TypeVar("C")


MOST_MOVES = 64
"""Moves of a layer that are tried without one that helps: all there are with eight virtual stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Layers of each virtual stage, chunk by chunk: ``layers[chunk * pp + rank]``.

    Raises:
        ConfigError: a stage without a layer, or a number of stages that ``pp`` does not divide.
    """

    pp: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.pp < 1 or not self.layers or len(self.layers) % self.pp:
            raise ConfigError(
                f"{len(self.layers)} stages cannot be dealt to --pp {self.pp}; "
                f"--pp {len(self.layers) or 1} works"
            )
        if min(self.layers) < 1:
            raise ConfigError(
                f"--num-layers {sum(self.layers)} leaves one of {len(self.layers)} stages without a "
                f"layer; --num-layers {len(self.layers)} works"
            )

    @property
    def vpp(self) -> int:
        """Model chunks per rank."""
        return len(self.layers) // self.pp

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(self.layers)

    def on(self, rank: int) -> tuple[int, ...]:
        """Layers of each chunk of ``rank``."""
        return self.layers[rank :: self.pp]

    def chunks(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Global layer indices of each chunk of ``rank``."""
        return chunks_of(self.layers, self.pp, rank)

    @property
    def layout(self) -> Layout:
        """The partition for Megatron's ``--pipeline-model-parallel-layout``."""
        return Layout.from_counts(self.layers, self.pp)

    def move(self, source: int, target: int) -> Partition | None:
        """One layer fewer on virtual stage ``source``, one more on ``target``; None if that would
        leave a stage without a layer. Layers in between shift by one, so all stay contiguous."""
        if source == target or self.layers[source] < 2:
            return None
        counts = list(self.layers)
        counts[source] -= 1
        counts[target] += 1
        return Partition(pp=self.pp, layers=tuple(counts))


def even(num_layers: int, pp: int, vpp: int = 1) -> Partition:
    """Megatron's split: as many layers on every virtual stage.

    Megatron refuses numbers that do not divide. Here the rest goes to the stages after the first,
    one each: the first holds the embedding and most microbatches in flight, the last the head.

    Raises:
        ConfigError: fewer layers than virtual stages.
    """
    stages = pp * vpp
    base, rest = divmod(num_layers, stages)
    order = [*range(1, stages - 1), 0]
    more = set(order[:rest])
    return Partition(pp=pp, layers=tuple(base + (stage in more) for stage in range(stages)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance(Generic[C]):
    """A partition that fits, what was planned for its ranks, and its time.

    ``planned`` counts how many (rank, layers) pairs had been planned by then.
    """

    partition: Partition
    stages: tuple[C, ...]
    iteration_ns: int
    planned: int


class Evaluations(Generic[C]):
    """Plans and scores, each made once.

    ``whole`` replaces planning rank by rank when a complete split is judged, for plans that depend
    on the other ranks too (the stall does); it may raise InfeasibleError. ``floor`` is a time that no
    plans of a split can beat; ``hurry`` says that a search should end with what it has, ``over`` that it
    should end with nothing, too.
    """

    def __init__(
        self,
        plan_stage: Callable[[int, tuple[int, ...]], C | None],
        score: Callable[[Sequence[C]], int],
        period: Callable[[C], int],
        whole: Callable[[Partition], Sequence[C]] | None = None,
        floor: Callable[[Partition], int] = lambda partition: 0,
        hurry: Callable[[], bool] = lambda: False,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._plan_stage, self._score, self._period, self._whole = plan_stage, score, period, whole
        self.floor, self.hurry, self.over = floor, hurry, over
        self._stages: dict[tuple[int, tuple[int, ...]], C | None] = {}
        self._misfits: dict[int, list[tuple[int, ...]]] = {}
        self._balances: dict[Partition, Balance[C] | None] = {}
        self.reasons: dict[tuple[int, tuple[int, ...]], InfeasibleError] = {}
        """Why a (rank, layers) pair does not fit, where ``plan_stage`` said so."""

    @property
    def planned(self) -> int:
        """(rank, layers) pairs planned so far."""
        return len(self._stages)

    def stage(self, rank: int, layers: tuple[int, ...]) -> C | None:
        """The plan of one rank; None if it does not fit. Where fewer layers do not fit, more do
        not either, and are not tried."""
        key = (rank, layers)
        if key not in self._stages:
            if self._hopeless(rank, layers):
                return None
            self._stages[key] = self._try(key)
            if self._stages[key] is None:
                self._misfits.setdefault(rank, []).append(layers)
        return self._stages[key]

    def _hopeless(self, rank: int, layers: tuple[int, ...]) -> bool:
        return any(
            all(a <= b for a, b in zip(held, layers, strict=True)) for held in self._misfits.get(rank, ())
        )

    def _try(self, key: tuple[int, tuple[int, ...]]) -> C | None:
        try:
            return self._plan_stage(*key)
        except InfeasibleError as error:
            self.reasons[key] = error
            return None

    def period(self, rank: int, layers: tuple[int, ...]) -> int | None:
        """Time of one microbatch on a rank; None if the layers do not fit."""
        plan = self.stage(rank, layers)
        return None if plan is None else self._period(plan)

    def periods(self, balance: Balance[C]) -> list[int]:
        """Time of one microbatch on each rank of a split."""
        return [self._period(stage) for stage in balance.stages]

    def balance(self, partition: Partition) -> Balance[C] | None:
        """Plan and score a whole split; None if a rank does not fit."""
        if partition not in self._balances:
            self._balances[partition] = self._judge(partition)
        return self._balances[partition]

    def _judge(self, partition: Partition) -> Balance[C] | None:
        stages = self._plan(partition)
        if stages is None:
            return None
        return Balance(
            partition=partition,
            stages=stages,
            iteration_ns=self._score(stages),
            planned=self.planned,
        )

    def _plan(self, partition: Partition) -> tuple[C, ...] | None:
        if self._whole is not None:
            try:
                return tuple(self._whole(partition))
            except InfeasibleError as error:
                self.reasons.setdefault((error.stage, partition.on(error.stage)), error)
                return None
        stages = []
        for rank in range(partition.pp):
            plan = self.stage(rank, partition.on(rank))
            if plan is None:
                return None
            stages.append(plan)
        return tuple(stages)

    def nothing_fits(self) -> LynxError:
        """The error to raise: of the reasons on record, the one that lacks least."""
        if not self.reasons:
            return LynxError("no split of the layers fits; fewer layers or more memory would")
        return min(self.reasons.values(), key=lambda error: error.needed_bytes - error.budget_bytes)


def greedy(start: Partition, evaluations: Evaluations[C]) -> Balance[C]:
    """The paper's: move a layer from the slowest rank to the fastest, while the step gets shorter.

    With several chunks the layer leaves the rank's largest chunk and joins the other's smallest.

    Raises:
        InfeasibleError: the start does not fit (``search`` looks further).
    """
    best = evaluations.balance(start)
    if best is None:
        raise evaluations.nothing_fits()
    while not evaluations.hurry():
        periods = evaluations.periods(best)
        slowest = max(range(start.pp), key=lambda rank: periods[rank])
        fastest = min(range(start.pp), key=lambda rank: periods[rank])
        moved = _move_between(best.partition, slowest, fastest)
        if moved is None or evaluations.floor(moved) >= best.iteration_ns:
            return best
        found = evaluations.balance(moved)
        if not found or found.iteration_ns >= best.iteration_ns:
            return best
        best = found
    return best


def _move_between(partition: Partition, source: int, target: int) -> Partition | None:
    gives, takes = partition.on(source), partition.on(target)
    largest = max(range(partition.vpp), key=lambda chunk: gives[chunk])
    smallest = min(range(partition.vpp), key=lambda chunk: takes[chunk])
    return partition.move(largest * partition.pp + source, smallest * partition.pp + target)


def search(
    num_layers: int,
    pp: int,
    vpp: int,
    evaluations: Evaluations[C],
    microbatches: int,
    *,
    reach: int = 4,
) -> Balance[C]:
    """The best split found: seeds, then one-layer moves as long as one makes the step shorter.

    Seeds are the even split, the paper's from there, and two by dynamic programming over a table of
    periods with up to ``reach`` layers more or fewer than even on each rank: the smallest longest
    period, and the smallest (microbatches - 1) * longest + sum. The table grows until something
    fits, so a split is found whenever there is one.

    Raises:
        InfeasibleError: no split fits.
    """
    start = even(num_layers, pp, vpp)
    seeds = [] if evaluations.balance(start) is None else [greedy(start, evaluations)]
    for partition in _table_seeds(start, evaluations, microbatches, reach, whole=not seeds):
        found = evaluations.balance(partition)
        if found is not None:
            seeds.append(found)
    if not seeds:
        raise evaluations.nothing_fits()
    seeds.sort(key=lambda seed: seed.iteration_ns)
    tops = [_climb(seed, evaluations) for seed in dict.fromkeys(seeds[:2])]
    return min(tops, key=lambda top: top.iteration_ns)


def _climb(best: Balance[C], evaluations: Evaluations[C]) -> Balance[C]:
    """One-layer moves between any two virtual stages, those from slow to fast ranks first, until
    ``MOST_MOVES`` in a row have not helped."""
    improved = True
    while improved:
        improved, tried = False, 0
        for moved in _moves(best.partition, evaluations.periods(best)):
            if tried == MOST_MOVES or evaluations.hurry():
                return best
            if evaluations.floor(moved) >= best.iteration_ns:
                continue
            tried += 1
            found = evaluations.balance(moved)
            if found is not None and found.iteration_ns < best.iteration_ns:
                best, improved = found, True
                break
    return best


def _moves(partition: Partition, periods: Sequence[int]) -> Iterator[Partition]:
    stages = range(len(partition.layers))
    pairs = sorted(
        ((a, b) for a in stages for b in stages if a != b),
        key=lambda pair: periods[pair[1] % partition.pp] - periods[pair[0] % partition.pp],
    )
    for source, target in pairs:
        moved = partition.move(source, target)
        if moved is not None:
            yield moved


def _table_seeds(
    start: Partition, evaluations: Evaluations[C], microbatches: int, reach: int, *, whole: bool
) -> Iterator[Partition]:
    """Splits by dynamic programming. If nothing is known to fit (``whole``), the table grows until
    something does, first with chunks as equal as can be, then with any."""
    pp, vpp, total = start.pp, start.vpp, start.num_layers
    uneven_from = total
    stop = evaluations.over if whole else evaluations.hurry
    for unequal in (False, True) if whole and vpp > 1 else (False,):
        near = reach
        while True:
            if stop():
                return
            table = _table(start, evaluations, near, unequal=unequal, whole=whole)
            found = bottleneck(table.periods, total)
            if found is not None:
                for ranks in (found, summed(table.periods, total, microbatches)):
                    if ranks is not None:
                        yield _assemble(table, ranks, pp, vpp)
                return
            if not whole or near >= uneven_from or evaluations.hurry():
                break
            near *= 2


def _table(start: Partition, evaluations: Evaluations[C], reach: int, *, unequal: bool, whole: bool) -> Table:
    """Periods of each rank by its number of layers, and how its chunks share them. In a hurry it has gaps;
    where nothing is known to fit (``whole``), only when time is over."""
    pp, vpp, total = start.pp, start.vpp, start.num_layers
    most = total - (pp - 1) * vpp
    stop = evaluations.over if whole and not unequal else evaluations.hurry
    periods: list[dict[int, int]] = []
    shares: list[dict[int, tuple[int, ...]]] = []
    for rank in range(pp):
        times, shared = dict[int, int](), dict[int, tuple[int, ...]]()
        own = sum(start.on(rank))
        for layers in range(max(vpp, own - reach), min(most, own + reach) + 1):
            for share in spread(layers, vpp, last=rank == pp - 1, unequal=unequal):
                if stop():
                    break
                period = evaluations.period(rank, share)
                if period is not None:
                    times[layers], shared[layers] = period, share
                    break
        periods.append(times)
        shares.append(shared)
    return Table(periods=tuple(periods), shares=tuple(shares))


def _assemble(table: Table, ranks: Sequence[int], pp: int, vpp: int) -> Partition:
    counts = [0] * (pp * vpp)
    for rank, layers in enumerate(ranks):
        counts[rank::pp] = table.shares[rank][layers]
    return Partition(pp=pp, layers=tuple(counts))
