"""Planning configurations one after the other, or several at once, each on a core of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import InfeasibleError
from megatron_lynx.job import Job
from megatron_lynx.search.floors import Floor
from megatron_lynx.search.found import WITH, Found
from megatron_lynx.search.space import Config, Question
from megatron_lynx.search.workflow import Planned, plan_job

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A configuration to plan with each of the planners of each side, which share the time; ``exact``
    marks what that gives."""

    question: Question
    config: Config
    floor_ns: int
    costs: CostTable
    source: str
    planners: Mapping[str, tuple[str, ...]]
    partition: str
    time_limit_s: float
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """A task and the best it gave for each side; a side for which nothing fits is missing. ``cut`` says
    that time ran out before all of its planners had theirs."""

    task: Task
    found: tuple[Found, ...]
    cut: bool = False


def work(task: Task) -> Done:
    """Plan one configuration.

    On Megatron's even split nothing is faster than to keep everything: where that fits it is all there is.
    """
    job = task.question.job(task.config, task.costs)
    ends, left = time.monotonic() + task.time_limit_s, sum(map(len, task.planners.values()))
    keeps = _planned(task, job, "none", task.time_limit_s) if task.partition == "keep" else None
    found = []
    for side, planners in task.planners.items():
        tries: list[Planned | None] = [keeps] if keeps else []
        for planner in () if keeps else planners:
            tries.append(_planned(task, job, planner, (ends - time.monotonic()) / left))
            left -= 1
        fitting = [planned for planned in tries if planned is not None]
        if fitting:
            found.append(_entry(task, side, min(fitting, key=lambda planned: planned.iteration_ns)))
    return Done(task, tuple(found), cut=time.monotonic() > ends)


def _planned(task: Task, job: Job, planner: str, share_s: float) -> Planned | None:
    deadline = time.monotonic() + share_s
    try:
        return plan_job(job, planner, task.partition, time_limit_s=task.time_limit_s, deadline=deadline)
    except InfeasibleError:
        return None


def _entry(task: Task, side: str, planned: Planned) -> Found:
    moved = f" + {task.partition}" if task.partition != "keep" and task.config.pp > 1 else ""
    keeps = all(not layer.choices for stage in planned.plan.stages for layer in stage.layers)
    return Found(
        config=task.config,
        side=side,
        row=planned.row(("none" if keeps else planned.plan.planner) + moved),
        plan=planned.plan,
        floor_ns=task.floor_ns,
        exact=task.exact or (keeps and task.config.pp == 1),
        costs=task.source,
    )


Bounds = dict[str, int]
"""A configuration's floor for each side."""


@dataclass(frozen=True, slots=True)
class Part:
    """Configurations to bound for each of ``sides``, with their costs."""

    question: Question
    sides: tuple[str, ...]
    configs: tuple[tuple[Config, CostTable], ...]


def bound(part: Part) -> list[tuple[Config, Bounds | None]]:
    """The floors of configurations; None for those that cannot fit."""
    found: list[tuple[Config, Bounds | None]] = []
    for config, costs in part.configs:
        floor = Floor(part.question.job(config, costs))
        steps = {side: floor.step_ns(hides=side == WITH) for side in part.sides} if floor.fits else None
        found.append((config, steps))
    return found


class Workers:
    """Processes, each on a core of its own; with one job the work is done in this one."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool = (
            ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_ignore_interrupts)
            if jobs > 1
            else None
        )

    def each(self, function: Callable[[T], R], items: Iterator[T]) -> Iterator[R]:
        """Results as they come. An item is taken only when a core is free for it, so that it can be chosen
        by what is known then."""
        if self._pool is None:
            yield from map(function, items)
            return
        running: set[Future[R]] = set()
        while True:
            while len(running) < self._jobs and (item := next(items, None)) is not None:
                running.add(self._pool.submit(function, item))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()

    def close(self) -> None:
        """End the processes when they are done with what they have begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C is for the process that collects the results."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
