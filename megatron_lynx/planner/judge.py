"""What every plan of a stage passes before anybody sees it: ``verify``, and a report of its price."""

from __future__ import annotations

import time

from megatron_lynx.errors import PlanError
from megatron_lynx.graph import LayerGraph
from megatron_lynx.plan import StagePlan
from megatron_lynx.planner.price import Price
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import PlannedStage, SolveReport
from megatron_lynx.planner.verify import timeline, walk


def judged(
    problem: StageProblem,
    plan: StagePlan,
    graph: LayerGraph,
    price: Price,
    *,
    who: str,
    planner: str,
    status: str,
    bound_ns: int | None,
    soft: bool,
    started_ns: int,
) -> PlannedStage:
    """A planned stage, if ``verify`` finds nothing wrong. ``who`` made the plan, since ``started_ns``
    (``time.perf_counter_ns``); the other words are those of ``SolveReport``.

    Raises:
        PlanError: ``verify`` refuses the plan (an error of ours; the timeline shows where).
    """
    result = walk(problem, plan, graph=graph, soft=soft)
    if result.violations:
        raise PlanError(f"{who} broke a rule\n{timeline(problem, plan, result)}")
    short = 0 if bound_ns is None else max(0, price.exposed_ns - bound_ns)
    report = SolveReport(
        planner=planner,
        status=status,
        exposed_ns=price.exposed_ns,
        hidden_ns=price.hidden_ns,
        kept_bytes=price.kept_bytes,
        rebuilt_bytes=price.rebuilt_bytes,
        peak_bytes=price.peak_bytes,
        peak_point=price.peak_point,
        bound_ns=bound_ns,
        gap=short / price.exposed_ns if short else 0.0,
        wall_ns=time.perf_counter_ns() - started_ns,
    )
    return PlannedStage(plan=plan, report=report, graph=graph)
