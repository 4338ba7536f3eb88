"""What ``--lynx-report DIR`` writes: the job, the plan, and one JSON line a step and rank.

``job.json`` is the job, ``plan.txt`` the plan, ``costs.json`` what it was made from (where it was made
at start), ``steps.<rank>.jsonl`` the record; `lynx report DIR` reads them:

    {"schema": 3, "run": "20261130T175906.123456", "iteration": 203, "step": 3, "stage": 0,
     "step_ns": 81000000, "clock": "host", "rebuilt_storages": {"bwd": 40, "demand": 2},
     "rebuilt_bytes": {...},
     "kept_bytes": {"0": 1048576}, "left_bytes": 0, "demand": {"0": {"replays": 2, "time_ns": 52000}},
     "windows": {"bwd:3:linear_fc1": {"opened": 4, "work_ns": 91000, "wait_ns": 2000, ...}}}

``step_ns`` is the schedule alone, without the optimizer. ``clock`` is whose times the others are:
``device`` for events on a GPU's stream. ``run`` is when the run began; a job that is started again
appends to the same files, and job, plan and costs of the run before go to ``earlier/<its run>``.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from megatron.training import get_args

from megatron_lynx.cost import CostTable
from megatron_lynx.integration.planning import Asked
from megatron_lynx.integration.session import Session
from megatron_lynx.plan import Plan
from megatron_lynx.runtime.clock import HostClock, clock_for
from megatron_lynx.runtime.record import StepRecord

SCHEMA = 3

EARLIER = "earlier"
"""The folder of what belongs to earlier runs."""

_OF_A_RUN = ("job.json", "plan.txt", "costs.json")


class ReportWriter:
    """Writes a run's report into ``folder``, after what earlier runs wrote there."""

    def __init__(self, folder: Path, rank: int, plan: Plan, table: CostTable | None, asked: Asked) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        box = [f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"]
        torch.distributed.broadcast_object_list(box, src=0)
        self._run = box[0]
        self._steps = folder / f"steps.{rank}.jsonl"
        _drop_half_a_line(self._steps)
        self._step = 0
        self._clock = HostClock()
        self._stage = 0
        if rank == 0:
            _keep_earlier(folder)
            (folder / "plan.txt").write_text(str(plan))
            if table is not None:
                (folder / "costs.json").write_text(table.to_json())
            (folder / "job.json").write_text(_job(asked, plan, self._run))

    def attach(self, session: Session) -> None:
        """Record the steps of ``session``, timed on its device."""
        self._stage = session.executor.plan.stage
        self._clock = session.executor.clock = clock_for(session.executor.device)
        session.on_step = self.write

    def write(self, record: StepRecord) -> None:
        """Append one step."""
        self._clock.settle()
        self._step += 1
        line = {
            "schema": SCHEMA,
            "run": self._run,
            "iteration": get_args().curr_iteration + 1,
            "step": self._step,
            "stage": self._stage,
            "step_ns": time.perf_counter_ns() - record.began_ns,
            "clock": self._clock.name,
            "rebuilt_storages": dict(record.rebuilt_storages),
            "rebuilt_bytes": dict(record.rebuilt_bytes),
            "kept_bytes": {str(layer): size for layer, size in record.kept_bytes.items()},
            "left_bytes": record.left_bytes,
            "demand": {str(layer): asdict(one) for layer, one in record.demand.items()},
            "windows": {str(window): asdict(one) for window, one in record.windows.items()},
        }
        with self._steps.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _drop_half_a_line(path: Path) -> None:
    """What a rank was writing when it was killed; make the file if there is none."""
    with path.open("ab+") as file:
        file.seek(0)
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def _keep_earlier(folder: Path) -> None:
    """Move the files of the run before out of the way."""
    before = folder / "job.json"
    if not before.exists():
        return
    try:
        run = str(json.loads(before.read_text())["run"])
    except (ValueError, KeyError, TypeError):  # of another version, or cut short
        run = "unknown"
    (folder / EARLIER / run).mkdir(parents=True, exist_ok=True)
    for name in _OF_A_RUN:
        if (folder / name).exists():
            (folder / name).replace(folder / EARLIER / run / name)


def _job(asked: Asked, plan: Plan, run: str) -> str:
    facts = {
        "schema": SCHEMA,
        "run": run,
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "ranks": torch.distributed.get_world_size(),
        "model": asdict(asked.model),
        "parallel": asdict(asked.parallel),
        "batch": asdict(asked.batch),
        "memory_bytes": asked.memory_bytes,
        "layout": asked.layout or plan.layout,
        "optimizer": asdict(asked.optimizer),
        "counted": asked.counted,
    }
    return json.dumps(facts, indent=1) + "\n"
