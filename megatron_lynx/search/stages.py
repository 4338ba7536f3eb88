"""StagePlans: plans and scores the stages of one job; where planners meet the simulator.

Stalls come from a simulation without recomputation, then from the plans made for those before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from megatron_lynx import planner as planners
from megatron_lynx.errors import InfeasibleError
from megatron_lynx.graph import LayerGraph
from megatron_lynx.job import Job
from megatron_lynx.partition.layout import chunks_of
from megatron_lynx.plan import LayerPlan, StagePlan, relabel
from megatron_lynx.planner import PlannedStage, SolveOptions
from megatron_lynx.planner.fill import filled
from megatron_lynx.search.lacking import does_not_fit
from megatron_lynx.search.pools import Pools, aligned, pick
from megatron_lynx.search.problems import stage_problem
from megatron_lynx.simulator.engine import SimStage, iteration_ns, sim_stage, stalls_ns
from megatron_lynx.simulator.floor import RankTimes, floor_ns, rank_times
from megatron_lynx.simulator.ledger import GraphIndex

Split = tuple[int, ...]
"""Layers of each virtual stage: chunk 0 of every rank, then chunk 1 of every rank, and so on."""


def _keep(stage: int, chunks: tuple[tuple[int, ...], ...]) -> StagePlan:
    layers = tuple(LayerPlan(layer=layer) for chunk in chunks for layer in chunk)
    return StagePlan(stage=stage, chunks=chunks, layers=layers)


OVERLAPPING = frozenset({"windows", "heu", "mixed", "opt"})
"""Planners that use the stall, whose length depends on what all stages do."""

ROUNDS = 4

_STALL_STEP = 16
"""Stalls are rounded down to this fraction of a layer's forward, so that plans can be shared."""

Key = tuple[int, tuple[int, ...], int, str, bool]
"""Stage, layers of each chunk, length of the stall, planner, whether work may overrun a window."""


class StagePlans:
    """Plans stages of one job, and remembers what it planned.

    Stages with the same number of layers in each chunk differ only in the names of their layers,
    so a plan is made once, with layers numbered from 0, and placed later.

    How long a stage stalls depends on the plans of all stages: what it rebuilds on demand eats up
    its own stall and may lengthen those of others. So several lengths are tried, and of all plans
    made for a stage the ones are taken that make the *simulated* step shortest. The longer waits before
    the first backward and in the cooldown are filled after planning (``fill``). ``time_limit_s``
    bounds the solving of a whole split by ``opt``; ``options`` that of one stage.
    """

    def __init__(
        self, job: Job, options: SolveOptions, time_limit_s: float, deadline: float | None = None
    ) -> None:
        self.job, self.options, self.time_limit_s, self.deadline = job, options, time_limit_s, deadline
        self._searching_s = 0.0
        self.end_by(deadline)
        self._scores: dict[tuple[int, ...], int] = {}
        self._plans: dict[Key, PlannedStage | InfeasibleError] = {}
        self.chosen: dict[str, list[Split]] = {}
        """By planner, the splits that a search has found for it."""
        self._times: dict[int, tuple[PlannedStage, SimStage]] = {}
        self._free: dict[tuple[int, tuple[int, ...]], SimStage] = {}
        self._ranks: dict[tuple[int, tuple[int, ...]], tuple[RankTimes, int]] = {}
        self._index = GraphIndex(job.graph)
        self._stalls: dict[int, int] = {}
        self._filled: dict[int, tuple[PlannedStage, PlannedStage]] = {}

    def stage(
        self,
        stage: int,
        layers: tuple[int, ...],
        planner: str,
        stall_ns: int = 0,
        *,
        soft: bool = False,
        limit_s: float | None = None,
    ) -> PlannedStage:
        """Plan rank ``stage`` with so many layers in each chunk, numbered from 0.

        ``soft`` lets work overrun its window, where the job's options allow it.

        Raises:
            InfeasibleError: with the smallest memory of the device that would do.
        """
        key = (stage, layers, stall_ns, planner, soft)
        if key not in self._plans:
            self._plans[key] = self._solve(key, limit_s)
        found = self._plans[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def _solve(self, key: Key, limit_s: float | None) -> PlannedStage | InfeasibleError:
        stage, layers, stall_ns, planner, soft = key
        problem = stage_problem(self.job, stage, chunks_of(layers, 1, 0), stall_ns)
        options = replace(self.options, soft=soft and self.options.soft)
        hard = self._plans.get((stage, layers, stall_ns, planner, False))
        if soft and isinstance(hard, PlannedStage):
            options = replace(options, start=hard.plan)
        if limit_s is not None or self.deadline is not None:
            least = 0.5 if self.deadline is None else 0.05
            limit = min(options.time_limit_s, self.left_s(), math.inf if limit_s is None else limit_s)
            options = replace(options, time_limit_s=max(least, limit))
        static = self.job.memory_bytes - problem.budget_bytes
        try:
            planned = planners.plan(problem, planner, options)
        except InfeasibleError as error:
            return does_not_fit(self.job, stage, static + error.needed_bytes, static, planner)
        self._stalls[id(planned)] = stall_ns
        return planned

    def layers(self, split: Split, stage: int) -> tuple[int, ...]:
        """Layers in each chunk of rank ``stage``."""
        return tuple(split[stage :: self.job.parallel.pp])

    def whole(self, split: Split, planner: str) -> tuple[PlannedStage, ...]:
        """Plan all stages of a split alone, without stalls.

        Raises:
            InfeasibleError: of the stage that lacks most.
        """
        pools = self._pools()
        return self._pick(pools, self._offer(pools, split, planner, [0] * len(pools)))

    def best(self, split: Split, planner: str, rounds: int = ROUNDS) -> tuple[PlannedStage, ...]:
        """The plans of all stages of a split that make the simulated step shortest.

        For ``opt`` the choice includes what ``heu`` and ``checkmate`` plan, so it is never worse; it
        plans within the windows first, and from there with leave to overrun them. ``heu`` takes what
        ``checkmate`` has planned already, if it has: that costs no solving.
        ``rounds``: how often stalls are taken from the plans made for those before; with one none is filled.

        Raises:
            InfeasibleError: of the stage that lacks most.
        """
        if planner not in OVERLAPPING:
            return self.whole(split, planner)
        pools, started = self._pools(), time.monotonic()
        limit = min(self.time_limit_s, self.left_s()) / 3
        errors = self._settle(pools, split, "heu" if planner == "opt" else planner, rounds)
        if planner == "heu":
            self._add_known(pools, split, "checkmate")
        if planner != "opt":
            return self._finish(pools, errors) if rounds > 1 else self._pick(pools, errors, quick=True)
        quick = [self._finish(pools)] if all(pools) else []
        self._offer(pools, split, "checkmate", [0] * len(pools))
        stalls = self._made_for(pools) or self.free_stalls(split)
        errors = self._offer(pools, split, "opt", stalls, deadline=started + limit)
        if not errors and not self.over():
            again = self.stalls(self._pick(pools))
            self._offer(pools, split, "opt", again, deadline=started + 2 * limit)
        best = self._made_for(pools)
        if best is not None and self.options.soft:
            self._offer(pools, split, "opt", best, soft=True, deadline=started + 3 * limit)
        return self._finish(pools, self._without_inputs(pools, split, errors), *quick)

    def end_by(self, deadline: float | None) -> None:
        """What is planned from now on should be ready by then (``time.monotonic``)."""
        self.deadline = deadline
        self._searching_s = 0.0 if deadline is None else self.left_s()

    def left_s(self) -> float:
        """Time until the deadline, without end if there is none."""
        return math.inf if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def over(self) -> bool:
        """Whether the deadline has passed: what has a plan gets no other."""
        return not self.left_s()

    def late(self) -> bool:
        """Whether searches should end with what they have: half of the time is for what follows them."""
        return self.left_s() <= self._searching_s / 2

    def _add_known(self, pools: Pools, split: Split, planner: str) -> None:
        """Add to each stage's pool the plan that ``planner`` made before."""
        for stage, pool in enumerate(pools):
            known = self._plans.get((stage, self.layers(split, stage), 0, planner, False))
            if isinstance(known, PlannedStage) and all(known is not other for other in pool):
                pool.append(known)

    def _without_inputs(
        self, pools: Pools, split: Split, errors: Sequence[InfeasibleError]
    ) -> list[InfeasibleError]:
        """Plans for the stages that have none: full recomputation of groups of layers alone drops
        inputs of layers, and so may fit where nothing else does. For stages that still have none,
        which of the two needs less."""
        left = []
        for error in errors:
            layers = self.layers(split, error.stage)
            try:
                if not pools[error.stage]:
                    pools[error.stage].append(self.stage(error.stage, layers, "full-uniform"))
            except InfeasibleError as other:
                least = min(error.needed_bytes, other.needed_bytes)
                static = self.job.footprint(error.stage, sum(layers)).static_bytes
                left.append(does_not_fit(self.job, error.stage, least, static, "opt"))
        return left

    def _pools(self) -> Pools:
        return [[] for _ in range(self.job.parallel.pp)]

    def _made_for(self, pools: Pools) -> tuple[int, ...] | None:
        """The stalls that the best plans so far were made for; None if a stage has no plan."""
        return tuple(self._stalls[id(plan)] for plan in self._pick(pools)) if all(pools) else None

    def _offer(
        self,
        pools: Pools,
        split: Split,
        planner: str,
        stalls: Sequence[int],
        *,
        soft: bool = False,
        deadline: float | None = None,
    ) -> list[InfeasibleError]:
        """Add a plan for each stage to its pool; returns why some stages got none.

        The time until ``deadline`` is shared by the stages that are still to come. After it, or after
        that of all, only stages without a plan are planned.
        """
        errors = []
        for stage, pool in enumerate(pools):
            left = None if deadline is None else (deadline - time.monotonic()) / (len(pools) - stage)
            if pool and (self.over() or (left is not None and left <= 0)):
                continue
            try:
                planned = self.stage(
                    stage, self.layers(split, stage), planner, stalls[stage], soft=soft, limit_s=left
                )
            except InfeasibleError as error:
                errors.append(error)
                continue
            if all(planned is not other for other in pool):
                pool.append(planned)
        return errors

    def _settle(self, pools: Pools, split: Split, planner: str, rounds: int) -> list[InfeasibleError]:
        """Offer plans for no stalls at all, for stalls as they are without recomputation, then as
        the plans make them, until they repeat; for the best of these, plans that may overrun."""
        errors = self._offer(pools, split, planner, [0] * len(pools))
        stalls, seen = self.free_stalls(split), set[tuple[int, ...]]()
        for number in range(1, rounds + 1):
            if stalls in seen or self.over():
                break
            seen.add(stalls)
            self._offer(pools, split, planner, stalls)
            keys = [(s, self.layers(split, s), stalls[s], planner, False) for s in range(len(pools))]
            made = [plan for key in keys if isinstance(plan := self._plans.get(key), PlannedStage)]
            if number == rounds or len(made) < len(pools):
                break
            stalls = self.stalls(made)
        best = self._made_for(pools) if self.options.soft and rounds > 1 else None
        if best is not None:
            self._offer(pools, split, planner, best, soft=True)
        return errors

    def _pick(
        self, pools: Pools, errors: Sequence[InfeasibleError] = (), *, quick: bool = False
    ) -> tuple[PlannedStage, ...]:
        """The best plans of the pools; ``quick``: of those made for the same stalls.

        Raises:
            InfeasibleError: a pool is empty; of ``errors`` the one of the stage that lacks most.
        """
        if not all(pools):
            empty = {stage for stage, pool in enumerate(pools) if not pool}
            raise max((e for e in errors if e.stage in empty), key=lambda error: error.needed_bytes)
        return pick(pools, aligned(pools), self.score, hurry=lambda: quick or self.over())

    def _finish(
        self, pools: Pools, errors: Sequence[InfeasibleError] = (), *known: Sequence[PlannedStage]
    ) -> tuple[PlannedStage, ...]:
        """The best of the pools and of the same plans with their stalls filled, no worse than ``known``."""
        best = self._pick(pools, errors)
        rows: list[Sequence[PlannedStage]] = [best, *known]
        if self.options.stall and self.options.soft:
            rows.append([self._fill(planned) for planned in best])
            if not self.over():
                pools = [[*pool, *map(self._fill, pool)] for pool in pools]
        return pick(pools, rows, self.score, hurry=self.over)

    def _fill(self, planned: PlannedStage) -> PlannedStage:
        """``planned`` with its stall filled, itself where there is nothing to fill."""
        if id(planned) not in self._filled:
            plan = planned.plan
            problem = stage_problem(self.job, plan.stage, plan.chunks, self._stalls[id(planned)])
            problem = replace(self.options.restrict(problem), has_stall=True)
            self._filled[id(planned)] = (planned, filled(problem, planned))
        return self._filled[id(planned)][1]

    def _kept(self, stage: int, layers: tuple[int, ...]) -> SimStage:
        """A rank's times without any recomputation, whatever memory says."""
        key = (stage, layers)
        if key not in self._free:
            self._free[key] = self._simulated(_keep(stage, chunks_of(layers, 1, 0)), self.job.graph)
        return self._free[key]

    def _simulated(self, plan: StagePlan, graph: LayerGraph) -> SimStage:
        job = self.job
        index = self._index if graph is job.graph else graph
        return sim_stage(plan, index, job.costs, job.parallel, job.microbatches)

    def floor(self, split: Split) -> int:
        """A time that no plans of a split can beat: a bound of the step without recomputation, with
        the optimizer."""
        job, ranks, most = self.job, list[RankTimes](), 0
        for stage in range(job.parallel.pp):
            layers = self.layers(split, stage)
            key = (stage, layers)
            if key not in self._ranks:
                kept = self._kept(stage, layers)
                times = rank_times(kept.early_ns, kept.body_ns, job.parallel, job.microbatches, stage)
                self._ranks[key] = times, job.footprint(stage, sum(layers)).parameters
            ranks.append(self._ranks[key][0])
            most = max(most, self._ranks[key][1])
        return floor_ns(ranks, job.parallel, job.costs.p2p_ns) + job.step_ns(most)

    def needed(self, stage: int, layers: tuple[int, ...], planner: str) -> int:
        """The smallest memory of a device with which some plan of ``planner`` fits."""
        small = replace(self.job, memory_bytes=1)
        key = (stage, layers, 0, planner, False)
        found = StagePlans(small, self.options, self.time_limit_s, self.deadline)._solve(key, None)
        assert isinstance(found, InfeasibleError)
        return found.needed_bytes

    def free_stalls(self, split: Split) -> tuple[int, ...]:
        """The stalls of a split without any recomputation."""
        stages = range(self.job.parallel.pp)
        return self.stalls([self._kept(stage, self.layers(split, stage)) for stage in stages])

    def stalls(self, stages: Sequence[PlannedStage | SimStage]) -> tuple[int, ...]:
        """The steady wait of each stage before a backward."""
        job = self.job
        times = [s if isinstance(s, SimStage) else self.times(s) for s in stages]
        waits = stalls_ns(times, job.parallel, job.microbatches, job.costs.p2p_ns)
        step = max(1, job.costs.layer.layer_forward_ns // _STALL_STEP)
        return tuple(wait // step * step for wait in waits)

    def times(self, stage: PlannedStage) -> SimStage:
        """The times of a planned stage."""
        found = self._times.get(id(stage))
        if found is None:
            found = self._times[id(stage)] = (stage, self._simulated(stage.plan, stage.graph))
        return found[1]

    def score(self, stages: Sequence[PlannedStage]) -> int:
        """Simulated time of a step, without the optimizer."""
        job, tables = self.job, [self.times(stage) for stage in stages]
        key = tuple(map(id, tables))  # of tables that are kept in _times
        if key not in self._scores:
            self._scores[key] = iteration_ns(tables, job.parallel, job.microbatches, job.costs.p2p_ns)
        return self._scores[key]

    def iteration(self, stages: Sequence[PlannedStage]) -> int:
        """Simulated time of a step with the optimizer of the rank with most parameters."""
        job = self.job
        counts = [job.footprint(s.plan.stage, len(s.plan.layers)).parameters for s in stages]
        return self.score(stages) + job.step_ns(max(counts))

    def placed(self, split: Split, stages: Sequence[PlannedStage]) -> tuple[PlannedStage, ...]:
        """The same plans with the layers' global numbers."""
        pp = self.job.parallel.pp
        return tuple(
            replace(s, plan=relabel(s.plan, chunks_of(split, pp, rank))) for rank, s in enumerate(stages)
        )
