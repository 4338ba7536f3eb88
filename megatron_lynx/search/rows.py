"""Row: what one method gives for a job, in numbers; and the JSON that machines read.

Field names are those of the JSON, which is versioned: ``compare_json`` is the only writer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lynx.job import Job

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One pipeline rank.

    ``layers`` are global indices. ``in_flight`` counts microbatches, over all chunks. Bytes:
    ``static_bytes`` besides activations, ``kept_bytes`` of all microbatches in flight,
    ``rebuilt_bytes`` the most that is rebuilt and alive at once, ``peak_bytes`` of everything.
    Times are for one microbatch: ``backward_ns`` without recomputation, which is
    ``recompute_hidden_ns`` inside windows and ``recompute_exposed_ns`` on the critical path.
    """

    stage: int
    layers: tuple[int, ...]
    in_flight: int
    static_bytes: int
    kept_bytes: int
    rebuilt_bytes: int
    peak_bytes: int
    forward_ns: int
    backward_ns: int
    recompute_hidden_ns: int
    recompute_exposed_ns: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method.

    ``method`` names it for people (``full-block-3``, ``opt + search``), ``planner`` is the name
    that ``--planner`` takes. Without ``fits``, ``reason`` says why, ``stage`` lacks most, ``needed_bytes``
    is the memory of a device with which it would fit, and the times are None.
    ``tflops_per_gpu`` counts what the model needs, not what is recomputed; ``mfu`` is its share of the
    device's peak, None where the device is not known. ``host_bound``: the step waits for the process that
    launches kernels.
    """

    method: str
    planner: str
    fits: bool
    reason: str | None = None
    stage: int | None = None
    needed_bytes: int | None = None
    iteration_ns: int | None = None
    tokens_per_second: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    host_bound: bool = False
    layout: str | None = None
    stages: tuple[StageRow, ...] = ()

    def speedup_over(self, other: Row) -> float | None:
        """How many times faster this one is; None if either does not fit."""
        if self.iteration_ns is None or other.iteration_ns is None:
            return None
        return other.iteration_ns / self.iteration_ns


def job_facts(job: Job) -> dict[str, Any]:
    """The job as JSON values: ``model``, ``parallel``, ``batch``, ``cluster``."""
    facts: dict[str, Any] = {
        "model": asdict(job.model),
        "parallel": {
            **asdict(job.parallel),
            "distributed_optimizer": job.optimizer.use_distributed_optimizer,
        },
        "batch": {**asdict(job.batch), "num_microbatches": job.microbatches},
        "cluster": {
            "name": job.cluster.name if job.cluster else None,
            "memory_bytes": job.memory_bytes,
            "costs": job.costs.source,
        },
    }
    return facts


def compare_json(job: Job, rows: Sequence[Row]) -> str:
    """The object that ``lynx plan --json`` and ``lynx compare --json`` print."""
    whole = {"schema": SCHEMA, **job_facts(job), "rows": [asdict(row) for row in rows]}
    return json.dumps(whole, indent=1) + "\n"
