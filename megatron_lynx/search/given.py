"""What a plan that is given would do: its timeline, its time, and the graph it counts by."""

from __future__ import annotations

from megatron_lynx.footprint import embedding_bytes, head_bytes
from megatron_lynx.graph import LayerGraph
from megatron_lynx.job import Job
from megatron_lynx.layers import kind_of
from megatron_lynx.plan import Plan
from megatron_lynx.planner.baselines import plan_graph
from megatron_lynx.search.check import check_plan
from megatron_lynx.simulator.engine import SimJob, iteration_ns, sim_stage, simulate
from megatron_lynx.simulator.ledger import GraphIndex
from megatron_lynx.simulator.timeline import Timeline
from megatron_lynx.spec import Model


def timeline_of(job: Job, plan: Plan) -> Timeline:
    """Simulate a step of the job under a plan that was read from a file.

    Raises:
        PlanError: the plan was made for another job, or names what it does not have.
    """
    check_plan(job, plan)
    return simulate(
        SimJob(
            stages=plan.stages,
            graph=graph_of(job, plan),
            table=job.costs,
            parallel=job.parallel,
            microbatches=job.microbatches,
            workspace_bytes=job.workspace_bytes,
            head_bytes=head_bytes(job.model, job.parallel, job.batch),
            embedding_bytes=embedding_bytes(job.model, job.parallel, job.batch),
        )
    )


def score_plan(job: Job, plan: Plan) -> int:
    """Time of a step of the job under a plan, with the optimizer, without its timeline.

    Raises:
        PlanError: the plan was made for another job.
    """
    check_plan(job, plan)
    index = GraphIndex(graph_of(job, plan))
    tables = [sim_stage(stage, index, job.costs, job.parallel, job.microbatches) for stage in plan.stages]
    most = max(job.footprint(stage.stage, len(stage.layers)).parameters for stage in plan.stages)
    return iteration_ns(tables, job.parallel, job.microbatches, job.costs.p2p_ns) + job.step_ns(most)


def graph_of(job: Job, plan: Plan) -> LayerGraph:
    """The graph that a plan counts by."""
    return counted_by(job.graph, job.model, plan)


def counted_by(graph: LayerGraph, model: Model, plan: Plan) -> LayerGraph:
    """``graph`` as a plan counts by it: ``selective`` keeps the output of the region it drops."""
    return plan_graph(graph, kind_of(model).recompute_modules, plan.planner)
