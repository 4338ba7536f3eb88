"""From a job to a plan: the pure composer, and the public API of the planning half.

``plan_job`` plans one method, ``compare`` all of them, ``plan_with_costs`` is for a trainer that
has measured its costs. The steps: split the layers over the stages; find the windows (collectives
from the costs, stalls from a simulation without recomputation); plan each stage within what its
static memory leaves; simulate the whole step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from megatron_lynx import planner as planners
from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError, InfeasibleError
from megatron_lynx.job import Job, make_job
from megatron_lynx.layers import kind_of
from megatron_lynx.plan import Plan
from megatron_lynx.planner import SolveOptions, check_planner
from megatron_lynx.planner.baselines import module_sets
from megatron_lynx.search.check import check_plan
from megatron_lynx.search.offload import OFFLOAD, best_offload
from megatron_lynx.search.planned import Planned, assemble
from megatron_lynx.search.rows import Row
from megatron_lynx.search.splits import given_split, searched
from megatron_lynx.search.stages import StagePlans
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel

__all__ = [
    "MEGATRON_METHODS",
    "METHODS",
    "OFFLOAD",
    "PARTITIONS",
    "RECOMPUTE_METHODS",
    "Job",
    "Planned",
    "check_plan",
    "check_planner",
    "compare",
    "make_job",
    "plan_job",
    "plan_with_costs",
    "planner_names",
]

PARTITIONS = ("keep", "greedy", "search")
MODULES = "modules"
"""The best combination of Megatron's ``--recompute-modules``, the same on all stages."""

RECOMPUTE_METHODS = ("none", "full-uniform", "full-block", "selective", MODULES)
"""Megatron's own ways to recompute, or not to."""

MEGATRON_METHODS = (*RECOMPUTE_METHODS, OFFLOAD)
"""What Megatron can do without lynx."""

METHODS = (*MEGATRON_METHODS, "tail-free", "checkmate", "adapipe", "heu", "opt")
"""All methods, in the order of a comparison."""

TIME_LIMIT_S = 40.0
"""What ``opt`` may take for one split of a job."""

OPTIONS = SolveOptions(relative_gap=0.01, soft=True)
"""A stage is solved to within a hundredth of what it rebuilds on demand; all windows may be used, and
overrun where the simulated step gets shorter by it."""

SWITCHES: Mapping[str, SolveOptions] = {
    "without stalls": replace(OPTIONS, stall=False),
    "without forward windows": replace(OPTIONS, forward=False),
    "without backward windows": replace(OPTIONS, backward=False),
    "without overrun": replace(OPTIONS, soft=False),
}
"""What each kind of window is worth: ``opt`` with all of them but one. A stall is filled only with
stalls and overrun both on: where the steady state has none, all work in it overruns."""


def planner_names() -> tuple[str, ...]:
    """Names that ``--planner`` takes."""
    return (*planners.PLANNERS, MODULES)


def _best_modules(bench: StagePlans, partition: str) -> Planned:
    """The fastest combination of ``--recompute-modules`` that fits all stages.

    Raises:
        InfeasibleError: none fits; of the one that lacks least.
    """
    sets = module_sets(kind_of(bench.job.model).recompute_modules)
    found, errors = _in_turn(bench, [partial(_plan, bench, planner, partition) for planner in sets])
    if errors and not found:
        raise min(errors, key=lambda error: error.needed_bytes)
    return min(found, key=lambda planned: planned.iteration_ns)


def _in_turn(
    bench: StagePlans, ways: Sequence[Callable[[], Planned]]
) -> tuple[list[Planned], list[InfeasibleError]]:
    """What comes of each of ``ways``, and why some fit nothing. They share the time until the deadline of
    ``bench``; after it, none follows the first that fits."""
    found, errors, whole = list[Planned](), list[InfeasibleError](), bench.deadline
    for number, way in enumerate(ways):
        bench.end_by(whole)
        if found and bench.over():
            break
        bench.end_by(part_of(whole, len(ways) - number))
        try:
            found.append(way())
        except InfeasibleError as error:
            errors.append(error)
    bench.end_by(whole)
    return found, errors


def plan_job(
    job: Job,
    planner: str = "opt",
    partition: str = "keep",
    options: SolveOptions = OPTIONS,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    deadline: float | None = None,
) -> Planned:
    """Plan a job with one planner.

    ``partition`` is ``keep`` (the job's layout, or an even split), ``greedy`` (the paper's) or
    ``search``, which is never worse than ``keep``. ``opt`` is never worse than ``checkmate`` or
    ``heu`` with the same partition. ``time_limit_s`` bounds solving by ``opt`` for one split; at the
    ``deadline`` (``time.monotonic``) searches end with what they have.

    Raises:
        ConfigError: no planner or partition of that name, or a layout that is not this job's.
        InfeasibleError: no plan fits; names the stage and the smallest ``--budget`` that would.
    """
    return _plan(StagePlans(job, options, time_limit_s, deadline), planner, partition)


def _plan(bench: StagePlans, planner: str, partition: str) -> Planned:
    if partition not in PARTITIONS:
        raise ConfigError(f"--partition {partition!r} is unknown; {', '.join(PARTITIONS)} works")
    if planner == MODULES:
        return _best_modules(bench, partition)
    if planner == OFFLOAD:
        return best_offload(bench)
    given = given_split(bench.job)
    if partition == "keep" or bench.job.parallel.pp == 1:
        return assemble(bench, planner, given)
    splits = [searched(bench, planner, partition)]
    if planner == "opt" and partition == "search" and not bench.late():
        with suppress(InfeasibleError):
            splits.append(searched(bench, "checkmate", partition))
    if planner == "heu":
        splits += bench.chosen.get("checkmate", ())
    different = dict.fromkeys((*splits, given))
    found, errors = _in_turn(bench, [partial(assemble, bench, planner, split) for split in different])
    if not found:
        raise errors[0]
    bench.chosen.setdefault(planner, []).extend(splits)
    return min(found, key=lambda planned: planned.iteration_ns)


def part_of(deadline: float | None, ways: int) -> float | None:
    """When the first of so many that share the time should be done."""
    if deadline is None:
        return None
    now = time.monotonic()
    return now + max(0.0, deadline - now) / ways


def plan_with_costs(
    model: Model,
    parallel: Parallel,
    batch: Batch,
    *,
    costs: CostTable,
    memory_bytes: int,
    planner: str = "opt",
    partition: str = "keep",
    layout: str | None = None,
    optimizer: Optimizer | None = None,
    options: SolveOptions = OPTIONS,
    counted: tuple[tuple[int, int], ...] = (),
    fixed: frozenset[str] = frozenset(),
) -> Plan:
    """The plan of a training run whose costs were measured, for use at its start.

    ``memory_bytes`` is what training may take on a device. Every rank that calls this with equal
    arguments gets the same plan, as long as no time limit stops the solver: plan on one rank and
    send the text to the others. ``counted`` and ``fixed`` are as in ``make_job``.

    Raises:
        ConfigError: the parts do not fit together.
        InfeasibleError: no plan fits.
    """
    job = make_job(
        model,
        parallel,
        batch,
        costs=costs,
        memory_bytes=memory_bytes,
        layout=layout,
        optimizer=optimizer,
        check_split=partition == "keep",
        counted=counted,
        fixed=fixed,
    )
    return plan_job(job, planner, partition, options).plan


def compare(
    job: Job,
    methods: Iterable[str] = METHODS,
    *,
    partitioned: Iterable[str] = ("checkmate", "adapipe", "heu", "opt"),
    options: SolveOptions = OPTIONS,
    switches: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    progress: Callable[[str], None] | None = None,
    deadline: float | None = None,
) -> tuple[Row, ...]:
    """Every method on the job's own split, then those of ``partitioned`` with ``search``.

    ``modules`` gives a row for each combination of ``--recompute-modules``, ``offload`` one for the best way
    to offload.

    A method that does not fit gives a row that says why. With ``switches``, rows of ``opt`` with
    one kind of window switched off follow. ``progress`` is told what comes next. The methods share the
    time until ``deadline`` (``time.monotonic``).
    """
    benches = {"": StagePlans(job, options, time_limit_s)}
    sets = module_sets(kind_of(job.model).recompute_modules)
    chosen = [(own, "keep", "") for method in methods for own in (sets if method == MODULES else (method,))]
    chosen += [(method, "search", "") for method in partitioned]
    if switches:
        benches |= {name: StagePlans(job, changed, time_limit_s) for name, changed in SWITCHES.items()}
        chosen += [("opt", "keep", name) for name in SWITCHES]
    rows = []
    for number, (method, partition, switch) in enumerate(chosen):
        benches[switch].end_by(part_of(deadline, len(chosen) - number))
        suffix = f" {switch}" if switch else "" if partition == "keep" else f" + {partition}"
        if progress is not None:
            progress(method + suffix)
        try:
            planned = _plan(benches[switch], method, partition)
            rows.append(planned.row((OFFLOAD if method == OFFLOAD else planned.plan.planner) + suffix))
        except InfeasibleError as error:
            rows.append(
                Row(
                    method=method + suffix,
                    planner=method,
                    fits=False,
                    reason=str(error),
                    stage=error.stage if error.needed_bytes else None,
                    needed_bytes=error.needed_bytes or None,
                )
            )
    return tuple(rows)


def method_of(planner: str) -> str:
    """A planner's name without its number or its modules."""
    whole = (name for name in (MODULES, OFFLOAD) if planner.startswith(f"{name}-"))
    return next(whole, planner.rstrip("-0123456789"))


def best_of(rows: Sequence[Row], planners: Iterable[str]) -> Row | None:
    """The fastest row that fits, among those made by ``planners`` (numbers and modules left out)."""
    names = set(planners)
    fitting = [
        row
        for row in rows
        if row.iteration_ns is not None and (row.planner in names or method_of(row.planner) in names)
    ]
    return min(fitting, key=lambda row: row.iteration_ns or 0, default=None)


def reference(row: Row, rows: Sequence[Row]) -> Row | None:
    """The optimum without overlap that a row is to be measured by: ``checkmate`` with the same
    freedom to move layers. None if it does not fit."""
    moved = row.method.endswith("+ search")
    same = [one for one in rows if one.planner == "checkmate" and one.method.endswith("+ search") == moved]
    return next((one for one in same if one.fits), None)
