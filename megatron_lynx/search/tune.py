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
from megatron_lynx.search.floors import Floor
from megatron_lynx.search.found import WITH, WITHOUT, Tuned
from megatron_lynx.search.shifts import shifts_of
from megatron_lynx.search.space import Config, Question, configurations
from megatron_lynx.search.workers import Done, Part, Task, Workers, bound, work

SIDES = {"megatron": (WITHOUT,), "lynx": (WITH,), "both": (WITHOUT, WITH)}
"""What ``--methods`` takes."""

QUICK = 3
"""How many configurations of a side are planned with their layers moved in each of two rounds: in the first
always, in the second with ``quick``."""

AHEAD = 12
"""How many configurations are planned before the first round."""

SHARES = ((0.2, 0.3, 0.4), (0.5, 0.75, 1.0))
"""When planning on even splits and moving layers for each side end, of the time left: in the first round,
and in a later one."""


PART = 100
"""How many configurations are bounded at a time."""

TIME_LIMIT_S, QUICK_S = 280.0, 50.0
"""What a search takes at most, and a quick one, unless it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far to go: entries asked for, seconds in all and for one configuration, processes."""

    top: int = 10
    quick: bool = False
    time_limit_s: float = TIME_LIMIT_S
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
    finally:
        search.workers.close()
    search.finish()
    return search.tuned


class _Search:
    def __init__(self, question: Question, methods: str, limits: Limits, progress: Progress) -> None:
        self.question, self.limits, self.progress = question, limits, progress
        self.sides = SIDES[methods]
        self.tuned = Tuned(question=question)
        self.deadline = self.until = time.monotonic() + limits.time_limit_s
        self.configs = configurations(question)
        self.workers = Workers(limits.jobs)
        self.costs = Costs(question, self.configs)
        self.floors: dict[str, dict[Config, int]] = {side: {} for side in self.sides}
        self.tried: dict[str, set[Config]] = {side: set() for side in self.sides}
        self.exact: dict[str, set[Config]] = {side: set() for side in self.sides}
        self.cut: dict[str, set[Config]] = {side: set() for side in self.sides}

    def run(self) -> None:
        """All phases: a few configurations all the way, so that bounds have something to beat; then all that
        might be faster, round after round while time cuts one short; then those that might be among the
        entries asked for."""
        self._bound()
        self._round(AHEAD, QUICK)
        while not self._late() and any(self._left(side) for side in self.sides):
            self._round(None, QUICK if self.limits.quick else None)
            if self.limits.quick:
                return
        self._consume("planning for the list", self._first(self.limits.top, None))

    def _round(self, most: int | None, few: int | None) -> None:
        """Plan on even splits, then with the layers moved: half of the time that is left, then a quarter for
        each side. So some is left for what comes later."""
        now = time.monotonic()
        ends = [now + (self.deadline - now) * share for share in SHARES[most is None]]
        self.until = ends[0]
        self._consume("planning", self._first(1, most))
        for side, end in zip(self.sides, ends[-len(self.sides) :], strict=True):
            self.until = end
            self._consume(f"moving layers, {side}", self._moved(side, few))
        self.until = self.deadline

    def _bound(self) -> None:
        """Floors of all configurations that have room for their weights."""
        seen = 0
        for part in self.workers.each(bound, self._parts()):
            seen += len(part)
            self.progress(f"bounding {seen} of {len(self.configs)} configurations", self.tuned)
            for config, floors in part:
                for side, floor in floors.items() if floors else ():
                    self.floors[side][config] = floor
        for side in self.sides:
            tally = self.tuned.tallies[side]
            tally.configurations = len(self.configs)
            tally.no_room = seen - len(self.floors[side])

    def _parts(self) -> Iterator[Part]:
        question = replace(self.question, profiles=())
        for first in range(0, len(self.configs), PART):
            if self._late():
                return
            configs = self.configs[first : first + PART]
            yield Part(question, self.sides, tuple((one, self.costs.of(one)[0]) for one in configs))

    def _late(self) -> bool:
        now = time.monotonic()
        if now >= self.deadline - 1:
            self.tuned.stopped = self.tuned.stopped or f"after {self.limits.time_limit_s:.0f} s"
        return now >= min(self.until, self.deadline - 1)

    def _task(
        self, config: Config, planners: Mapping[str, tuple[str, ...]], partition: str, *, exact: bool
    ) -> Task:
        costs, source = self.costs.of(config)
        left, most = self.deadline - time.monotonic(), self.limits.time_limit_s / AHEAD
        return Task(
            question=replace(self.question, profiles=()),
            config=config,
            floor_ns=min(self.floors[side][config] for side in planners),
            costs=costs,
            source=source,
            planners=planners,
            partition=partition,
            time_limit_s=min(self.limits.plan_s, left, most),
            exact=exact,
        )

    def _first(self, place: int, most: int | None) -> Iterator[Task]:
        """Configurations that may come among the first ``place``, by rising floor, ``most`` of them."""
        given = 0
        lowest = {
            config: min(floors[config] for floors in self.floors.values())
            for config in self.floors[self.sides[0]]
        }
        for config in sorted(lowest, key=lambda one: (lowest[one], one)):
            if given == most or self._late():
                return
            sides = [
                side
                for side in self.sides
                if self.floors[side][config] < self.tuned.rank_ns(side, place)
                and config not in self.tried[side]
            ]
            if not sides:
                continue
            for side in sides:
                self.tried[side].add(config)
            given += 1
            planners = {side: ("heu",) if side == WITH else self._megatron(config, place) for side in sides}
            yield self._task(config, planners, "keep", exact=False)

    def _open(self, side: str, done: set[Config]) -> list[Config]:
        """Configurations that might beat the best of a side and are not done: those that were fast on
        either side first, then by floor."""
        best, found = self.tuned.rank_ns(side, 1), dict[Config, int]()
        for one in (one for known in self.tuned.found.values() for one in known):
            found[one.config] = min(one.iteration_ns, found.get(one.config, one.iteration_ns))
        floors = self.floors[side]
        left = [c for c, floor in floors.items() if floor < best and c not in done]
        return sorted(left, key=lambda c: (found.get(c, 1 << 62), floors[c], c))

    def _moved(self, side: str, most: int | None) -> Iterator[Task]:
        """Configurations that might beat the best of their side, with their layers moved."""
        done = self.exact[side] | self.cut[side]
        known = len(done)
        while not self._late() and len(done) - known != most:
            left = self._open(side, done)
            if not left:
                return
            done.add(left[0])
            self.tried[side].add(left[0])
            planners = ("opt",) if side == WITH else self._megatron(left[0], 1)
            yield self._task(left[0], {side: planners}, "search", exact=True)

    def _left(self, side: str) -> list[Config]:
        """Configurations that might beat the best of a side, and have not had their turn."""
        return self._open(side, self.exact[side] | self.cut[side])

    def _megatron(self, config: Config, place: int) -> tuple[str, ...]:
        """Megatron's options that might come among the first ``place``: full recomputation of a block (of 0
        layers, too), and those that rebuild something in every layer, if that leaves them a chance."""
        costs, best = self.costs.of(config)[0].layer, self.tuned.rank_ns(WITHOUT, place)
        job = self.question.job(config, self.costs.of(config)[0])
        modules = kind_of(self.question.model).recompute_modules
        least = {"full-uniform": costs.layer_forward_ns}
        for planner in ("selective", *module_sets(modules)):
            regions = (region for module in modules_of(planner) for region in modules[module])
            least[planner] = sum(costs.forward_ns.get(region, 0) for region in regions)
        floor = Floor(job)
        others = [name for name, again in least.items() if floor.step_ns(again, hides=False) < best]
        return ("full-block", *others)

    def _consume(self, text: str, tasks: Iterator[Task]) -> None:
        for number, done in enumerate(self.workers.each(work, tasks), start=1):
            self._note(done)
            self.progress(f"{text}: {number}", self.tuned)

    def _note(self, done: Done) -> None:
        """Keep what a task gave; what needs no option at all is for both sides."""
        if done.task.exact:
            for side in done.task.planners:
                (self.cut if done.cut else self.exact)[side].add(done.task.config)
        for entry in done.found:
            whole = entry.keeps_all and entry.config.pp == 1  # there is nothing left to find
            for side in self.sides if entry.keeps_all else (entry.side,):
                exact = whole or (entry.exact and side == entry.side and not done.cut)
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
            unbounded = tally.configurations - tally.no_room - len(self.floors[side])
            tally.unproven = len(self._open(side, self.exact[side])) + unbounded
            tally.bounded = len(self.floors[side].keys() - self.tried[side]) - len(
                set(self._open(side, self.exact[side])) - self.tried[side]
            )
        for one in self.tuned.found[WITH][: self.limits.top]:
            self.tuned.shifts[one.config] = shifts_of(self.question, one, self.costs.of(one.config)[0])
