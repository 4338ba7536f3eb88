"""A folder as ``--lynx-report`` writes it, made up: each figure is known to the tests."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_lynx.job import Job
from megatron_lynx.plan import Plan

STEP_NS = 5_000_000
WORK_NS, WAIT_NS, DEMAND_NS = 700, 300, 900
STEPS = 3
RUN = "20261130T120000.000000"


def write_run(folder: Path, job: Job, plan: Plan, *, costs: bool = True) -> None:
    """Write ``STEPS`` steps of one rank per stage; the first step took ten times as long.

    Every window of the plan opened once with work for each microbatch, and the head's once without.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text(str(plan))
    facts = {
        "schema": 3,
        "run": RUN,
        "ranks": len(plan.stages),
        "model": asdict(job.model),
        "parallel": asdict(job.parallel),
        "batch": asdict(job.batch),
        "memory_bytes": job.memory_bytes,
        "layout": plan.layout,
        "optimizer": asdict(job.optimizer),
    }
    (folder / "job.json").write_text(json.dumps(facts))
    if costs:
        (folder / "costs.json").write_text(job.costs.to_json())
    for stage in plan:
        lines = [json.dumps(_line(job, plan, stage.stage, step)) for step in range(1, STEPS + 1)]
        # A run that still writes leaves half a line.
        (folder / f"steps.{stage.stage}.jsonl").write_text("\n".join(lines) + '\n{"schema": 3, "st')


def _line(job: Job, plan: Plan, stage: int, step: int) -> dict[str, Any]:
    slow, count = (10 if step == 1 else 1), job.microbatches
    one = {"opened": count, "work_ns": slow * WORK_NS * count, "wait_ns": slow * WAIT_NS * count}
    rest = {"empty": 0, "empty_wait_ns": 0, "storages": count, "size_bytes": 64 * count}
    head = {"opened": 0, "work_ns": 0, "wait_ns": 0, "empty": count, "empty_wait_ns": WAIT_NS * count}
    windows = {str(window): {**one, **rest} for window in plan.stages[stage].windows()}
    layers = [layer.layer for layer in plan.stages[stage].layers]
    return {
        "schema": 3,
        "run": RUN,
        "iteration": 100 + step,
        "step": step,
        "step_ns": slow * STEP_NS,
        "clock": "host",
        "rebuilt_storages": {},
        "rebuilt_bytes": {},
        "kept_bytes": {str(layer): 1024 for layer in layers},
        "left_bytes": 0,
        "demand": {str(layer): {"replays": 1, "time_ns": slow * DEMAND_NS} for layer in layers},
        "windows": {**windows, "head": {**head, "storages": 0, "size_bytes": 0}},
    }
