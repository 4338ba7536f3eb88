"""What the planner of one stage of a job is asked: the device's memory less what is static is its budget,
the costs give its windows, and the length of its stall is said."""

from __future__ import annotations

from megatron_lynx.job import Job
from megatron_lynx.layers import kind_of
from megatron_lynx.planner import StageProblem
from megatron_lynx.schedule import turns


def stage_problem(
    job: Job, stage: int, chunks: tuple[tuple[int, ...], ...], stall_ns: int = 0
) -> StageProblem:
    """What the planner of rank ``stage`` is asked when it holds the layers in ``chunks``."""
    parallel, kind = job.parallel, kind_of(job.model)
    layers = sum(len(chunk) for chunk in chunks)
    last = stage == parallel.pp - 1
    footprint = job.footprint(stage, layers)
    return StageProblem(
        stage=stage,
        chunks=chunks,
        graph=job.graph,
        costs=job.costs.layer,
        turns=turns(parallel, job.microbatches, stage),
        budget_bytes=job.memory_bytes - footprint.static_bytes,
        forward_slots=kind.forward_slots(parallel),
        backward_slots=kind.backward_slots(parallel),
        stall_ns=stall_ns,
        head_ns=job.costs.head_window_ns if last else 0,
        workspace_bytes=job.workspace_bytes,
        head_bytes=footprint.moments.head_bytes,
        embedding_bytes=footprint.moments.embedding_bytes,
        step_bytes=footprint.moments.step_bytes,
        recompute_modules=kind.recompute_modules,
    )
