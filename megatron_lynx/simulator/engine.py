"""Discrete events over ranks: when each pass of each microbatch runs.

A rank runs its actions in the order of its schedule. An action starts when the rank is free; its
early work (rebuilding in a stall) runs at once, its body when what it requires has arrived. What
crosses to another rank occupies the link of its direction for ``p2p_ns``, one transfer after the
other; the sender does not wait for it. Times are integer nanoseconds.

Everything happens in an order that is fixed by the schedule alone (``program``), and one flat loop over
it is the whole event engine. ``steady`` does the same without running every round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_lynx.cost import CostTable
from megatron_lynx.graph import LayerGraph
from megatron_lynx.plan import StagePlan
from megatron_lynx.simulator.ledger import GraphIndex
from megatron_lynx.simulator.program import Program, counts, program
from megatron_lynx.simulator.steady import Step
from megatron_lynx.simulator.timeline import Run, Timeline
from megatron_lynx.simulator.walk import StageWalk
from megatron_lynx.spec import Parallel

_MANY_ROUNDS = 12
"""With more rounds for each rank it is quicker to look for those that repeat than to run them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStage:
    """One rank's times, as tables over the variants of its passes.

    ``early_ns[k]`` may run before the input arrives, ``body_ns[k]`` after; ``k`` is ``variant``.
    """

    early_ns: tuple[int, ...]
    body_ns: tuple[int, ...]

    @classmethod
    def of(
        cls,
        forward_ns: Sequence[int],
        backward_ns: Sequence[int],
        early_ns: Sequence[int] | None = None,
    ) -> SimStage:
        """A rank whose passes take the same time whatever they serve; one entry per chunk."""
        chunks = len(forward_ns)
        early = [0] * chunks if early_ns is None else early_ns
        body = [t for row in (*forward_ns, *backward_ns) for t in (row,) * (chunks + 1)]
        first = [t for row in ([0] * chunks + list(early)) for t in (row,) * (chunks + 1)]
        return cls(early_ns=tuple(first), body_ns=tuple(body))

    @classmethod
    def from_walk(cls, walk: StageWalk, used: Collection[int] | None = None) -> SimStage:
        """The times of a plan; entries that are not ``used`` are left at 0."""
        chunks = walk.chunks
        width = chunks + 1
        early, body = [0] * (2 * chunks * width), [0] * (2 * chunks * width)
        for key in range(2 * chunks * width) if used is None else used:
            row, column = divmod(key, width)
            partner = None if column == chunks else column
            one = walk.forward(row, partner) if row < chunks else walk.backward(row - chunks, partner)
            early[key], body[key] = one.early_ns, one.body_ns
        return cls(early_ns=tuple(early), body_ns=tuple(body))

    @property
    def period_ns(self) -> int:
        """Time of one microbatch in all chunks when the pipeline is full: the slowest variants.

        Work for a stall is left out: it is to be hidden.
        """
        chunks = self._chunks()
        width = chunks + 1
        return sum(max(self.body_ns[row * width : (row + 1) * width]) for row in range(2 * chunks))

    def _chunks(self) -> int:
        chunks = 1
        while 2 * chunks * (chunks + 1) < len(self.body_ns):
            chunks += 1
        return chunks


def _play(prog: Program, stages: Sequence[SimStage], p2p_ns: int) -> tuple[list[int], list[int]]:
    """The event loop: when each op ends, and when its result has arrived where it goes."""
    early = [t for stage in stages for t in stage.early_ns]
    body = [t for stage in stages for t in stage.body_ns]
    free = [0] * prog.ranks
    wire = [0] * (2 * prog.ranks)
    ends: list[int] = []
    arrivals: list[int] = []
    for rank, key, back, link in prog.ops:
        now = free[rank] + early[key]
        if back and arrivals[-back] > now:
            now = arrivals[-back]
        now += body[key]
        free[rank] = now
        ends.append(now)
        if link >= 0 and p2p_ns:
            sent = wire[link]
            now = (sent if sent > now else now) + p2p_ns
            wire[link] = now
        arrivals.append(now)
    return ends, arrivals


def iteration_ns(stages: Sequence[SimStage], parallel: Parallel, microbatches: int, p2p_ns: int = 0) -> int:
    """Time from the first forward to the last backward; the cheap entry for a search."""
    prog = program(parallel, microbatches)
    if prog.rounds > _MANY_ROUNDS * prog.ranks:
        return step_of(prog, stages, p2p_ns).makespan_ns
    return max(_play(prog, stages, p2p_ns)[0])


def stalls_ns(
    stages: Sequence[SimStage], parallel: Parallel, microbatches: int, p2p_ns: int = 0
) -> tuple[int, ...]:
    """How long each rank typically waits for a gradient, as ``Timeline.stall_ns``."""
    prog = program(parallel, microbatches)
    if prog.rounds > _MANY_ROUNDS * prog.ranks:
        step = step_of(prog, stages, p2p_ns)
        return tuple(map(step.stall_ns, range(prog.ranks)))
    ends, arrivals = _play(prog, stages, p2p_ns)
    waits: list[list[int]] = [[] for _ in stages]
    half, last = prog.width // 2, [-1] * prog.ranks
    for i, (rank, key, back, _) in enumerate(prog.ops):
        if key // half % 2 == 0:
            last[rank] = i
        elif last[rank] >= 0:
            waits[rank].append(max(0, arrivals[i - back] - ends[last[rank]]) if back else 0)
            last[rank] = -1
    return tuple(sorted(found)[(len(found) - 1) // 2] if found else 0 for found in waits)


def step_of(prog: Program, stages: Sequence[SimStage], p2p_ns: int = 0) -> Step:
    """A step without its timeline, and without the rounds that are as those before."""
    early = [t for stage in stages for t in stage.early_ns]
    body = [t for stage in stages for t in stage.body_ns]
    return Step(prog, early, body, p2p_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimJob:
    """What is to be simulated: a plan for every rank, and what things cost.

    ``graph`` is that of all layers, or one for each rank. ``workspace_bytes`` is what each phase of a
    layer's backward needs besides its saved storages; ``head_bytes`` is what the output layer and the
    loss take on the last rank, ``embedding_bytes`` the backward of the embedding on the first.
    ``fine`` counts memory by region instead of by phase (see ``ledger``).
    """

    stages: tuple[StagePlan, ...]
    graph: LayerGraph | tuple[LayerGraph, ...]
    table: CostTable
    parallel: Parallel
    microbatches: int
    workspace_bytes: tuple[int, ...] = ()
    head_bytes: int = 0
    embedding_bytes: int = 0
    fine: bool = False


def sim_stage(
    plan: StagePlan,
    graph: LayerGraph | GraphIndex,
    table: CostTable,
    parallel: Parallel,
    microbatches: int,
) -> SimStage:
    """The times of one rank under a plan, for ``iteration_ns``."""
    used = counts(parallel, microbatches)[plan.stage]
    return SimStage.from_walk(StageWalk(plan, graph, table, parallel.pp, timed_only=True), used)


def simulate(job: SimJob) -> Timeline:
    """Run one step of the job.

    Raises:
        ValueError: the number of plans or of chunks is not that of the parallel sizes.
    """
    parallel = job.parallel
    if len(job.stages) != parallel.pp:
        raise ValueError(f"{len(job.stages)} plans for {parallel.pp} pipeline ranks")
    for plan in job.stages:
        if len(plan.chunks) != parallel.vpp:
            raise ValueError(f"stage {plan.stage} has {len(plan.chunks)} chunks, not {parallel.vpp}")
    if isinstance(job.graph, LayerGraph):
        indexes = [GraphIndex(job.graph)] * parallel.pp
    else:
        indexes = [GraphIndex(graph) for graph in job.graph]
    walks = tuple(
        StageWalk(
            plan,
            index,
            job.table,
            parallel.pp,
            workspace_bytes=job.workspace_bytes,
            head_bytes=job.head_bytes,
            embedding_bytes=job.embedding_bytes,
            fine=job.fine,
        )
        for plan, index in zip(job.stages, indexes, strict=True)
    )
    prog = program(parallel, job.microbatches)
    used = counts(parallel, job.microbatches)
    tables = [SimStage.from_walk(walk, used[rank]) for rank, walk in enumerate(walks)]
    return play(prog, tables, job.table.p2p_ns, walks)


def play(
    prog: Program,
    stages: Sequence[SimStage],
    p2p_ns: int = 0,
    walks: Sequence[StageWalk] | None = None,
) -> Timeline:
    """Run a program on given times; with ``walks`` the timeline knows the inside of each pass."""
    ends, arrivals = _play(prog, stages, p2p_ns)
    runs: list[list[Run]] = [[] for _ in range(prog.ranks)]
    free = [0] * prog.ranks
    chunks, width = prog.chunks, prog.width
    for i, (op, action) in enumerate(zip(prog.ops, prog.actions, strict=True)):
        key = op.key - op.rank * width
        column = key % (chunks + 1)
        stage = stages[op.rank]
        runs[op.rank].append(
            Run(
                stage=op.rank,
                action=action,
                partner=None if column == chunks else column,
                start_ns=free[op.rank],
                ready_ns=free[op.rank] + stage.early_ns[key],
                arrival_ns=arrivals[i - op.back] if op.back else 0,
                begin_ns=ends[i] - stage.body_ns[key],
                end_ns=ends[i],
                sent_ns=arrivals[i] - p2p_ns if op.link >= 0 and p2p_ns else ends[i],
                delivered_ns=arrivals[i],
            )
        )
        free[op.rank] = ends[i]
    return Timeline(
        runs=tuple(tuple(rank) for rank in runs),
        walks=tuple(walks) if walks is not None else None,
    )
