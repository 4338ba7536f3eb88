"""How long the processes that launch kernels need for a step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lynx.job import Job
from megatron_lynx.planner import PlannedStage
from megatron_lynx.simulator.engine import iteration_ns, sim_stage


def host_ns(job: Job, stages: Sequence[PlannedStage]) -> int:
    """What the hosts need for a step under these plans; 0 where nothing is known of them."""
    table = job.host_costs()
    if table is None or job.cluster is None or job.cluster.host is None:
        return 0
    walks = [sim_stage(s.plan, s.graph, table, job.parallel, job.microbatches) for s in stages]
    ran = iteration_ns(walks, job.parallel, job.microbatches, table.p2p_ns)
    return ran + job.cluster.host.step_ns
