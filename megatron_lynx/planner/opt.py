"""OPT: the best plan with a choice for every layer and region, proven or with its gap.

The programs, each small enough to be quick; the later ones are rarely needed:

1. ``BoundModel`` gives a lower bound, and how often to rebuild each region on demand;
2. ``StageModel`` with ``reach=1`` (a layer uses its own forward windows and the backward windows next to
   it) looks for a plan that does just that: it meets the bound, and so is optimal;
3. the same without that hint gives ``mixed``;
4. ``StageModel`` over all windows closes what is left, from that plan and up to that bound.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.plan import StagePlan, Window
from megatron_lynx.planner.baselines import everything_on_demand, infeasible
from megatron_lynx.planner.block import tidy
from megatron_lynx.planner.bound import BoundModel
from megatron_lynx.planner.greedy import windows
from megatron_lynx.planner.heu import heu
from megatron_lynx.planner.price import Pricer, fits_whole, stage_plan
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import Answer, SolveOptions
from megatron_lynx.planner.stage_model import Counts, StageModel

BOUND_SHARE = 0.2
FOLLOW_SHARE = 0.3
NEAR_SHARE = 0.6
"""Of the time for a stage, when the first programs must have ended."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The best plan, its value (ns, or bytes of peak) and a proven lower bound of that."""

    plan: StagePlan | None
    value: float
    bound: float


def opt(problem: StageProblem, options: SolveOptions) -> Answer:
    """The best plan of all: optimal, or the best found with a proven bound."""
    return _answer(problem, options, "opt")


def mixed(problem: StageProblem, options: SolveOptions) -> Answer:
    """The best plan that ``opt`` finds with windows near a layer; its bound is opt's."""
    return _answer(problem, options, "mixed")


def _answer(problem: StageProblem, options: SolveOptions, planner: str) -> Answer:
    if fits_whole(problem):
        return Answer(plan=stage_plan(problem, {}), status="optimal", bound_ns=0)
    found = _search(problem, options, budget=True, near_only=planner == "mixed")
    if found.plan is None:
        lowest = _search(problem, options, budget=False, near_only=planner == "mixed")
        raise infeasible(problem, planner, round(lowest.value))
    bound = max(0, math.ceil(found.bound - 0.5))
    status = "optimal" if found.value <= bound else "heuristic" if planner == "mixed" else "limit"
    plan = restore(problem, found.plan)
    return Answer(plan=plan, status=status, bound_ns=min(bound, round(found.value)))


def restore(problem: StageProblem, plan: StagePlan) -> StagePlan:
    """Keep what is rebuilt in a window although there is room to keep it, longest work first.

    Rebuilding there costs nothing on paper; in fact it takes power and bandwidth.
    """
    pricer = Pricer(problem)
    made = {p.layer: dict(p.choices) for p in plan.layers}
    prices = {layer: pricer.layer(layer, choices) for layer, choices in made.items()}
    total = pricer.memory(list(prices.values()))
    hidden = [(pricer.work[n], k, n) for k, c in made.items() for n in c if isinstance(c[n], Window)]
    for _, layer, name in sorted(hidden, key=lambda entry: -entry[0]):
        fewer = tidy(problem, {n: c for n, c in made[layer].items() if n != name})
        price = pricer.layer(layer, fewer)
        changed = total - prices[layer].memory + price.memory
        if int(changed.max()) <= problem.budget_bytes:
            made[layer], prices[layer], total = fewer, price, changed
    return stage_plan(problem, made)


def _search(problem: StageProblem, options: SolveOptions, *, budget: bool, near_only: bool) -> _Found:
    """Bound, then plans until one meets it; least time with ``budget``, else the lowest peak."""
    begun, pricer = time.monotonic(), Pricer(problem)
    best = _Found(None, math.inf, 0.0)
    for plan in _quick(problem, options) if budget else [everything_on_demand(problem)]:
        best = _better(best, plan, pricer, budget)
    if best.value == 0:
        return best
    summed = BoundModel(problem, options, budget=budget)
    unit = 1000.0 if budget else float(summed.scale.unit)
    relaxed = summed.solve(begun + BOUND_SHARE * options.time_limit_s)
    if relaxed.status == "infeasible":
        return _Found(None, math.inf, math.inf)
    best = _Found(best.plan, best.value, max(0.0, relaxed.bound * unit))
    tries: list[tuple[int | None, Counts | None, float]] = [(1, None, NEAR_SHARE)]
    if budget and relaxed.status == "optimal":
        tries.insert(0, (1, summed.demands(relaxed), FOLLOW_SHARE))
    if not near_only:
        tries.append((None, None, 1.0))
    for reach, follow, share in tries:
        if best.value <= best.bound + 0.5:
            break
        stage = StageModel(problem, options, budget=budget, reach=reach)
        if follow is not None:
            stage.follow(follow)
        start = best.plan if follow is None else None
        solution = stage.solve(begun + share * options.time_limit_s, start, enough=best.bound / unit)
        if solution.values:
            best = _better(best, stage.plan(solution), pricer, budget)
        if reach is None and stage.scale.exact:
            best = _Found(best.plan, best.value, max(best.bound, solution.bound * unit))
    return best


def _quick(problem: StageProblem, options: SolveOptions) -> list[StagePlan]:
    """The plans of the quick planners, and the one to begin from."""
    found: list[StagePlan] = []
    for planner in (heu, windows):
        try:
            found.append(planner(problem, options).plan)
        except InfeasibleError:
            continue
    return found if options.start is None else [*found, options.start]


def _better(best: _Found, plan: StagePlan, pricer: Pricer, budget: bool) -> _Found:
    """``plan`` if it fits and is better than ``best``, re-priced in whole units."""
    price = pricer.price(plan)
    value = price.exposed_ns if budget else price.peak_bytes
    fits = not budget or price.peak_bytes <= pricer.problem.budget_bytes
    return _Found(plan, value, best.bound) if fits and value < best.value else best
