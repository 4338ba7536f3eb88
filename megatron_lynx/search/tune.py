"""The best job for so many devices, with lynx and without: every configuration bounded, some planned.

1. Each configuration gets a floor: a step that no split and no plan of it can beat (``floors``). Those
   whose weights do not fit are out.
2. By rising floor they are planned on an even split, with ``heu`` and with each of Megatron's options,
   until no floor is below the best step.
3. Those whose floor is below the best step are planned with their layers moved, best first: with Megatron's
   options, and with ``opt``. A few go this way first, to give the bounds something to beat.
4. As 2, for the entries of the list after the first.

What is left out is left out because of a bound, unless ``quick`` is given or time runs out, and
``Tally.unproven`` says how many might still be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_lynx.layers import kind_of
from megatron_lynx.planner.baselines import module_sets, modules_of
from megatron_lynx.search.extend import Costs
from megatron_lynx.search.floors import may_fit, step_floor_ns
from megatron_lynx.search.found import WITH, WITHOUT, Tuned
from megatron_lynx.search.shifts import shifts_of
from megatron_lynx.search.space import Config, Question, configurations
from megatron_lynx.search.workers import Done, Task, work_all
from megatron_lynx.search.workflow import MEGATRON_METHODS

SIDES = {"megatron": (WITHOUT,), "lynx": (WITH,), "both": (WITHOUT, WITH)}
"""What ``--methods`` takes."""

QUICK = 3
"""How many configurations of a side are planned with their layers moved in each of two rounds: in the first
always, in the second with ``quick``."""

AHEAD = 12
"""How many configurations are planned before the first round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far to go: entries asked for, seconds in all and for one plan, processes."""

    top: int = 10
    quick: bool = False
    time_limit_s: float = 280.0
    plan_s: float = 20.0
    jobs: int = 1


Progress = Callable[[str, Tuned], None]
"""Is told what is going on."""


def tune(
    question: Question,
    methods: str = "both",
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Search. A search that is interrupted (Ctrl-C) returns what it has.

    Raises:
        ConfigError: Megatron accepts no configuration, or a profile is of another model.
    """
    search = _Search(question, methods, limits or Limits(), progress or (lambda text, tuned: None))
    try:
        search.run()
    except KeyboardInterrupt:
        search.tuned.stopped = "interrupted"
    search.finish()
    return search.tuned


class _Search:
    def __init__(self, question: Question, methods: str, limits: Limits, progress: Progress) -> None:
        self.question, self.limits, self.progress = question, limits, progress
        self.sides = SIDES[methods]
        self.tuned = Tuned(question=question)
        self.deadline = time.monotonic() + limits.time_limit_s
        self.configs = configurations(question)
        self.costs = Costs(question, self.configs)
        self.floors: dict[Config, int] = {}
        self.tried: dict[str, set[Config]] = {side: set() for side in self.sides}
        self.exact: dict[str, set[Config]] = {side: set() for side in self.sides}

    def run(self) -> None:
        """All phases: a few configurations all the way, so that bounds have something to beat; then all that
        might be faster; then those that might be among the entries asked for."""
        self._bound()
        for most in (AHEAD, None):
            self._consume("planning", self._first(1, most))
            for side in self.sides:
                few = QUICK if most or self.limits.quick else None
                self._consume(f"moving layers, {side}", self._moved(side, few))
        if not self.limits.quick:
            self._consume("planning for the list", self._first(self.limits.top, None))

    def _bound(self) -> None:
        """Floors of all configurations that have room for their weights."""
        for number, config in enumerate(self.configs):
            if number % 100 == 0:
                self.progress(f"bounding {number} of {len(self.configs)} configurations", self.tuned)
            job = self.question.job(config, self.costs.of(config)[0])
            if may_fit(job):
                self.floors[config] = step_floor_ns(job)
        for side in self.sides:
            tally = self.tuned.tallies[side]
            tally.configurations = len(self.configs)
            tally.no_room = len(self.configs) - len(self.floors)

    def _late(self) -> bool:
        if time.monotonic() < self.deadline:
            return False
        self.tuned.stopped = self.tuned.stopped or f"after {self.limits.time_limit_s:.0f} s"
        return True

    def _task(
        self, config: Config, planners: Mapping[str, tuple[str, ...]], partition: str, *, exact: bool
    ) -> Task:
        costs, source = self.costs.of(config)
        left = max(1.0, self.deadline - time.monotonic())
        return Task(
            question=replace(self.question, profiles=()),
            config=config,
            floor_ns=self.floors[config],
            costs=costs,
            source=source,
            planners=planners,
            partition=partition,
            time_limit_s=min(self.limits.plan_s, left),
            exact=exact,
        )

    def _first(self, place: int, most: int | None) -> Iterator[Task]:
        """Configurations that may come among the first ``place``, by rising floor, ``most`` of them."""
        planners = {WITH: ("heu",), WITHOUT: MEGATRON_METHODS}
        given = 0
        for config, floor in sorted(self.floors.items(), key=lambda pair: (pair[1], pair[0])):
            sides = [side for side in self.sides if floor < self.tuned.rank_ns(side, place)]
            if not sides or given == most or self._late():
                return
            sides = [side for side in sides if config not in self.tried[side]]
            if not sides:
                continue
            for side in sides:
                self.tried[side].add(config)
            given += 1
            yield self._task(config, {side: planners[side] for side in sides}, "keep", exact=False)

    def _open(self, side: str, done: set[Config]) -> list[Config]:
        """Configurations that might beat the best of a side and are not done: those found first, then by
        floor."""
        best = self.tuned.rank_ns(side, 1)
        found = {one.config: one.iteration_ns for one in self.tuned.found[side]}
        left = [c for c, floor in self.floors.items() if floor < best and c not in done]
        return sorted(left, key=lambda c: (found.get(c, 1 << 62), self.floors[c], c))

    def _moved(self, side: str, most: int | None) -> Iterator[Task]:
        """Configurations that might beat the best of their side, with their layers moved."""
        done = set(self.exact[side])
        known = len(done)
        while not self._late() and len(done) - known != most:
            left = self._open(side, done)
            if not left:
                return
            done.add(left[0])
            self.tried[side].add(left[0])
            planners = ("opt",) if side == WITH else self._megatron(left[0])
            yield self._task(left[0], {side: planners}, "search", exact=True)

    def _megatron(self, config: Config) -> tuple[str, ...]:
        """Megatron's options that might win with their layers moved: full recomputation of a block (of 0
        layers, too), and those that rebuild something in every layer, if that leaves them a chance."""
        costs, best = self.costs.of(config)[0].layer, self.tuned.rank_ns(WITHOUT, 1)
        job = self.question.job(config, self.costs.of(config)[0])
        modules = kind_of(self.question.model).recompute_modules
        least = {"full-uniform": costs.layer_forward_ns}
        for planner in ("selective", *module_sets(modules)):
            regions = (region for module in modules_of(planner) for region in modules[module])
            least[planner] = sum(costs.forward_ns.get(region, 0) for region in regions)
        others = [name for name, again in least.items() if step_floor_ns(job, again) < best]
        return ("full-block", *others)

    def _consume(self, text: str, tasks: Iterator[Task]) -> None:
        for number, done in enumerate(work_all(tasks, self.limits.jobs), start=1):
            self._note(done)
            self.progress(f"{text}: {number}", self.tuned)

    def _note(self, done: Done) -> None:
        """Keep what a task gave; what needs no option at all is for both sides."""
        if done.task.exact:
            for side in done.task.planners:
                self.exact[side].add(done.task.config)
        for entry in done.found:
            whole = entry.keeps_all and entry.config.pp == 1  # there is nothing left to find
            for side in self.sides if entry.keeps_all else (entry.side,):
                exact = whole or (entry.exact and side == entry.side)
                self.tuned.add(replace(entry, side=side, exact=exact))
                if whole:
                    self.exact[side].add(entry.config)

    def finish(self) -> None:
        """Count what became of the configurations, and try the first entries on other clusters."""
        for side in self.sides:
            tally, found = self.tuned.tallies[side], {one.config for one in self.tuned.found[side]}
            tally.planned = len(self.tried[side])
            tally.misfits = len(self.tried[side] - found)
            tally.exact = len(self.exact[side])
            tally.unproven = len(self._open(side, self.exact[side]))
            tally.bounded = len(self.floors.keys() - self.tried[side]) - len(
                set(self._open(side, self.exact[side])) - self.tried[side]
            )
        for one in self.tuned.found[WITH][: self.limits.top]:
            self.tuned.shifts[one.config] = shifts_of(self.question, one, self.costs.of(one.config)[0])
