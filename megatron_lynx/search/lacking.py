"""What is said of a stage that does not fit."""

from __future__ import annotations

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.job import Job
from megatron_lynx.units import GIB, format_bytes


def does_not_fit(job: Job, stage: int, needed: int, static: int, planner: str) -> InfeasibleError:
    """The error that ``planner`` cannot fit a stage, with the smallest ``--budget`` that would do."""
    budget = f"--budget {-(-needed * 100 // GIB) / 100:.2f}GiB would fit"
    if job.cluster is not None and needed > job.cluster.device.memory_bytes:
        budget += f", but a device of {job.cluster.name} has less"
    return InfeasibleError(
        f"--planner {planner} does not fit stage {stage} into {format_bytes(job.memory_bytes)}: "
        f"it needs {format_bytes(needed)} ({format_bytes(static)} of them static); {budget}",
        stage=stage,
        budget_bytes=job.memory_bytes,
        needed_bytes=needed,
    )
