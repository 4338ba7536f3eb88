"""What ``--lynx-report DIR`` writes: the job, the plan, and one JSON line a step and rank.

``job.json`` is the job, ``plan.txt`` the plan, ``costs.json`` what it was made from (where it was made
at start), ``steps.<rank>.jsonl`` the record; `lynx report DIR` reads them:

    {"schema": 2, "step": 3, "step_ns": 81000000, "clock": "host",
     "rebuilt_storages": {"bwd": 40, "demand": 2}, "rebuilt_bytes": {...},
     "kept_bytes": {"0": 1048576}, "left_bytes": 0, "demand": {"0": {"replays": 2, "time_ns": 52000}},
     "windows": {"bwd:3:linear_fc1": {"opened": 4, "work_ns": 91000, "wait_ns": 2000, ...}}}

``step_ns`` is the schedule alone, without the optimizer. ``clock`` is whose times the others are:
``device`` for events on a GPU's stream.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_lynx.cost import CostTable
from megatron_lynx.integration.planning import Asked
from megatron_lynx.integration.session import Session
from megatron_lynx.plan import Plan
from megatron_lynx.runtime.clock import HostClock, clock_for
from megatron_lynx.runtime.record import StepRecord

SCHEMA = 2


class ReportWriter:
    """Writes a run's report into ``folder``; files of an earlier run are replaced."""

    def __init__(
        self, folder: Path, rank: int, plan: Plan, table: CostTable | None, asked: Asked | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._steps = folder / f"steps.{rank}.jsonl"
        self._steps.write_text("")
        self._step = 0
        self._clock = HostClock()
        if rank == 0:
            for old in folder.glob("steps.*.jsonl"):  # of a run with more ranks
                if int(old.name.split(".")[1]) >= torch.distributed.get_world_size():
                    old.unlink()
            (folder / "plan.txt").write_text(str(plan))
            if asked is not None:
                (folder / "job.json").write_text(_job(asked, plan))
            if table is not None:
                (folder / "costs.json").write_text(table.to_json())
            else:
                (folder / "costs.json").unlink(missing_ok=True)

    def attach(self, session: Session) -> None:
        """Record the steps of ``session``, timed on its device."""
        self._clock = session.executor.clock = clock_for(session.executor.device)
        session.on_step = self.write

    def write(self, record: StepRecord) -> None:
        """Append one step."""
        self._clock.settle()
        self._step += 1
        line = {
            "schema": SCHEMA,
            "step": self._step,
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


def _job(asked: Asked, plan: Plan) -> str:
    facts = {
        "schema": SCHEMA,
        "model": asdict(asked.model),
        "parallel": asdict(asked.parallel),
        "batch": asdict(asked.batch),
        "memory_bytes": asked.memory_bytes,
        "layout": asked.layout or plan.layout,
        "distributed_optimizer": asked.distributed_optimizer,
    }
    return json.dumps(facts, indent=1) + "\n"
