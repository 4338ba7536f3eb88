"""What would help most when a job does not fit: each single change, priced by the plan that needs least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_lynx.errors import ConfigError
from megatron_lynx.job import Job, make_job
from megatron_lynx.planner.result import SolveOptions
from megatron_lynx.search.splits import given_split
from megatron_lynx.search.stages import StagePlans
from megatron_lynx.spec import Batch, Optimizer, Parallel

LEAST = "full-uniform-1"
"""The method that is priced: of Megatron's own the one that needs least, or nearly."""


@dataclass(frozen=True, slots=True)
class Change:
    """``flag`` with the value that helps; ``needed_bytes`` the memory of the fullest stage with it."""

    flag: str
    needed_bytes: int
    gpus_factor: int = 1


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Memory of the fullest stage with full recomputation, by owner, largest first."""

    stage: int
    needed_bytes: int
    owners: tuple[tuple[str, int], ...]


def breakdown(job: Job) -> Breakdown:
    """Where the memory of the fullest stage goes with full recomputation."""
    needed = _needed(job)
    stage = max(range(len(needed)), key=lambda rank: needed[rank])
    layers = sum(given_split(job)[stage :: job.parallel.pp])
    footprint = job.footprint(stage, layers)
    owners = [*footprint.owners(), ("activations", needed[stage] - footprint.static_bytes)]
    owners.sort(key=lambda pair: -pair[1])
    return Breakdown(stage, needed[stage], tuple(pair for pair in owners if pair[1] > 0))


def best_change(job: Job) -> Change | None:
    """The single change after which the fullest stage needs least; one that needs no more devices wins
    where it is enough. None if no change helps."""
    now = max(_needed(job))
    found = []
    for flag, factor, changed in _changes(job):
        needed = max(_needed(changed))
        if needed < now:
            found.append(Change(flag, needed, factor))
    enough = [change for change in found if change.needed_bytes <= job.memory_bytes]
    return min(enough or found, key=lambda change: (change.gpus_factor, change.needed_bytes), default=None)


def advice(job: Job) -> str:
    """What to do when a planner does not fit: another planner, or the change that would help most."""
    if max(_needed(job)) <= job.memory_bytes:
        return "full recomputation fits: --planner opt finds a better plan that does"
    change = best_change(job)
    if change is None:
        return "not even full recomputation fits"
    enough = "fits" if change.needed_bytes <= job.memory_bytes else "still needs more"
    devices = ", with twice the GPUs" if change.gpus_factor > 1 else ""
    return f"{change.flag} would help most{devices}: with it full recomputation {enough}"


def _needed(job: Job) -> list[int]:
    """The least memory of each stage with full recomputation."""
    split, pp = given_split(job), job.parallel.pp
    bench = StagePlans(job, SolveOptions(), 1.0)
    return [bench.needed(rank, tuple(split[rank::pp]), LEAST) for rank in range(pp)]


def _changes(job: Job) -> Iterator[tuple[str, int, Job]]:
    p, b = job.parallel, job.batch
    halved = b.micro_batch_size // 2
    if b.micro_batch_size > 1 and b.micro_batch_size % 2 == 0:
        yield from _made(job, f"--micro-batch-size {halved}", 1, batch=replace(b, micro_batch_size=halved))
    if p.tp > 1 and not p.sequence_parallel:
        yield from _made(job, "--sequence-parallel", 1, parallel=replace(p, sequence_parallel=True))
    if p.dp > 1 and not job.optimizer.use_distributed_optimizer:
        sharded = replace(job.optimizer, use_distributed_optimizer=True)
        yield from _made(job, "--use-distributed-optimizer", 1, optimizer=sharded)
    dp, factor = (p.dp // 2, 1) if p.dp % 2 == 0 else (p.dp, 2)
    wider, longer = replace(p, dp=dp, tp=2 * p.tp), replace(p, dp=dp, pp=2 * p.pp)
    yield from _made(job, f"--tensor-model-parallel-size {wider.tp}", factor, parallel=wider)
    yield from _made(job, f"--pipeline-model-parallel-size {longer.pp}", factor, parallel=longer)


def _made(
    job: Job,
    flag: str,
    factor: int,
    *,
    parallel: Parallel | None = None,
    batch: Batch | None = None,
    optimizer: Optimizer | None = None,
) -> Iterator[tuple[str, int, Job]]:
    """The changed job; nothing where it is none, or its costs were measured for another shape."""
    if job.cluster is None:
        return
    try:
        made = make_job(
            job.model,
            parallel or job.parallel,
            batch or job.batch,
            cluster=job.cluster,
            memory_bytes=job.memory_bytes,
            layout=None if parallel else job.layout,
            optimizer=optimizer or job.optimizer,
        )
    except ConfigError:
        return
    yield flag, factor, made
