"""What ``--lynx-report DIR`` writes: the plan, and one JSON line a step and rank.

``plan.txt`` is the plan, ``costs.json`` what it was made from, ``steps.<rank>.jsonl`` the record:

    {"schema": 1, "step": 3, "rebuilt_storages": {"bwd": 40, "demand": 2}, "rebuilt_bytes": {...},
     "kept_bytes": {"0": 1048576}, "left_bytes": 0, "window_work_ns": {"bwd:3:linear_fc1": 91000}}
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_lynx.cost import CostTable
from megatron_lynx.plan import Plan
from megatron_lynx.runtime.record import StepRecord

SCHEMA = 1


class ReportWriter:
    """Writes a run's report into ``folder``; files of an earlier run are replaced."""

    def __init__(self, folder: Path, rank: int, plan: Plan, table: CostTable | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._steps = folder / f"steps.{rank}.jsonl"
        self._steps.write_text("")
        self._step = 0
        if rank == 0:
            (folder / "plan.txt").write_text(str(plan))
            if table is not None:
                (folder / "costs.json").write_text(table.to_json())

    def write(self, record: StepRecord) -> None:
        """Append one step."""
        self._step += 1
        line = {
            "schema": SCHEMA,
            "step": self._step,
            "rebuilt_storages": dict(record.rebuilt_storages),
            "rebuilt_bytes": dict(record.rebuilt_bytes),
            "kept_bytes": {str(layer): size for layer, size in record.kept_bytes.items()},
            "left_bytes": record.left_bytes,
            "window_work_ns": {str(window): time for window, time in record.window_work_ns.items()},
        }
        with self._steps.open("a") as file:
            file.write(json.dumps(line) + "\n")
