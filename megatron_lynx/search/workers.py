"""Planning configurations one after the other, or several at once, each on a core of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import InfeasibleError
from megatron_lynx.job import Job
from megatron_lynx.search.found import Found
from megatron_lynx.search.space import Config, Question
from megatron_lynx.search.workflow import Planned, plan_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A configuration to plan with each of the planners of each side; ``exact`` marks what that gives."""

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
    """A task and the best it gave for each side; a side for which nothing fits is missing."""

    task: Task
    found: tuple[Found, ...]


def work(task: Task) -> Done:
    """Plan one configuration.

    On Megatron's even split nothing is faster than to keep everything: where that fits it is all there is.
    """
    job = task.question.job(task.config, task.costs)
    keeps = _planned(task, job, "none") if task.partition == "keep" else None
    found = []
    for side, planners in task.planners.items():
        tries = [keeps] if keeps else [_planned(task, job, planner) for planner in planners]
        fitting = [planned for planned in tries if planned is not None]
        if fitting:
            found.append(_entry(task, side, min(fitting, key=lambda planned: planned.iteration_ns)))
    return Done(task, tuple(found))


def _planned(task: Task, job: Job, planner: str) -> Planned | None:
    deadline = time.monotonic() + task.time_limit_s
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


def work_all(tasks: Iterator[Task], jobs: int) -> Iterator[Done]:
    """Results as they come. A task is taken from ``tasks`` only when a core is free for it, so that it can
    be chosen by what is known then. Stopping early cancels what has not begun."""
    if jobs <= 1:
        yield from map(work, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_ignore_interrupts) as pool:
        running: set[Future[Done]] = set()
        try:
            while True:
                while len(running) < jobs and (task := next(tasks, None)) is not None:
                    running.add(pool.submit(work, task))
                if not running:
                    return
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C is for the process that collects the results."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
