"""Pools: for each stage the plans to choose from, and the choice with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_lynx.planner import PlannedStage

Pools = list[list[PlannedStage]]
"""For each stage the plans to choose from."""


def aligned(pools: Pools) -> list[list[PlannedStage]]:
    """The plans at each position of the pools; a shorter pool ends with its last one."""
    return [[pool[min(i, len(pool) - 1)] for pool in pools] for i in range(max(map(len, pools)))]


def pick(
    pools: Pools,
    rows: Sequence[Sequence[PlannedStage]],
    score: Callable[[Sequence[PlannedStage]], int],
    *,
    hurry: Callable[[], bool] = lambda: False,
) -> tuple[PlannedStage, ...]:
    """The best of ``rows`` (a plan for each stage), then one stage after the other is given another plan
    from its pool while it helps, or until there is no time left (``hurry``).

    ``score`` is the time of a step in nanoseconds. At equal time the row with fewest stalls filled,
    then the one that rebuilds least on demand, then least in all.
    """

    def cost(stages: Sequence[PlannedStage]) -> tuple[int, int, int, int]:
        reports = [stage.report for stage in stages]
        exposed, hidden = sum(r.exposed_ns for r in reports), sum(r.hidden_ns for r in reports)
        return score(stages), sum(stage.filled for stage in stages), exposed, hidden

    best = min(rows, key=cost)
    value, moved = cost(best), True
    while moved:
        moved = False
        for stage, pool in enumerate(pools):
            for other in pool:
                if hurry():
                    return tuple(best)
                if other is best[stage] or other.plan == best[stage].plan:
                    continue
                trial = [*best[:stage], other, *best[stage + 1 :]]
                if (worth := cost(trial)) < value:
                    best, value, moved = trial, worth, True
    return tuple(best)
