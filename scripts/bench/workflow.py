"""How long planning a whole job takes: ``python scripts/bench/workflow.py``.

Limits: 8 stages, layers moved between them: 2 s with HEU, 60 s with OPT. They are checked against
processor time (planning uses one core), so that a busy machine does not change the verdict.
"""

from __future__ import annotations

import sys
import time

from megatron_lynx.job import Job, make_job
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.workflow import plan_job
from megatron_lynx.spec import Batch, Parallel

LIMITS_S = {"heu": 2.0, "opt": 60.0}
JOBS = (
    ("gpt-13b", "a100-40g-nvlink", 4, 8, 8),
    ("gpt-13b", "a100-40g-pcie", 4, 8, 8),
    ("gpt-20b", "a100-40g-nvlink", 4, 8, 4),
    ("gpt-20b", "a100-40g-pcie", 4, 8, 4),
    ("gpt-7b", "a100-40g-nvlink", 2, 8, 4),
    ("gpt-7b", "a100-40g-pcie", 2, 8, 4),
    ("gpt-13b", "a100-40g-nvlink", 8, 8, 16),
    ("gpt-7b", "a100-40g-nvlink", 4, 8, 16),
)
"""Model, cluster, TP, PP, microbatch: each needs recomputation on several stages."""


def job(model: str, cluster: str, tp: int, pp: int, micro: int) -> Job:
    """One job of the table, with 4 microbatches for every stage."""
    return make_job(
        load_model(model),
        Parallel(tp=tp, pp=pp),
        Batch(seq_length=2048, micro_batch_size=micro, global_batch_size=4 * pp * micro),
        cluster=load_cluster(cluster),
        check_split=False,
    )


def main() -> int:
    """Print the table; 1 if a limit is exceeded."""
    print("| model | cluster | TP x PP | planner | split | CPU s | wall s | step |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    slow = False
    for row in JOBS:
        for planner, limit in LIMITS_S.items():
            started, busy_from = time.perf_counter(), time.process_time()
            planned = plan_job(job(*row), planner, "search")
            wall, busy = time.perf_counter() - started, time.process_time() - busy_from
            slow |= busy > limit
            split = " ".join(str(len(stage.plan.layers)) for stage in planned.stages)
            model, cluster, tp, pp, _ = row
            step = f"{planned.iteration_ns / 1e9:.3f} s"
            times = f"{busy:.2f} | {wall:.2f} | {step}"
            print(f"| {model} | {cluster} | {tp} x {pp} | {planner} | {split} | {times} |")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
