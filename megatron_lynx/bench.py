"""Bench: plans and scores the stages of one job; where planners meet the simulator.

A stage's problem is made here: its windows (collectives from the costs, stalls from a simulation
without recomputation) and its budget (the device's memory less what is static).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_lynx import planner as planners
from megatron_lynx.errors import InfeasibleError
from megatron_lynx.gpt import backward_slots, forward_slots
from megatron_lynx.job import Job
from megatron_lynx.partition.layout import chunks_of
from megatron_lynx.plan import LayerPlan, StagePlan, Window
from megatron_lynx.planner import PlannedStage, SolveOptions, StageProblem
from megatron_lynx.schedule import has_forward_windows, in_flight
from megatron_lynx.simulator.engine import SimJob, iteration_ns, sim_stage, simulate
from megatron_lynx.units import GIB, format_bytes

Split = tuple[int, ...]
"""Layers of each virtual stage: chunk 0 of every rank, then chunk 1 of every rank, and so on."""


def even_split(job: Job) -> Split:
    """As many layers on every virtual stage; the first ones take one more if they do not divide."""
    stages = job.parallel.pp * job.parallel.vpp
    base, rest = divmod(job.model.num_layers, stages)
    return tuple(base + (1 if i < rest else 0) for i in range(stages))


def stage_problem(
    job: Job, stage: int, chunks: tuple[tuple[int, ...], ...], stall_ns: int = 0
) -> StageProblem:
    """What the planner of rank ``stage`` is asked when it holds the layers in ``chunks``."""
    parallel = job.parallel
    layers = tuple(len(chunk) for chunk in chunks)
    last = stage == parallel.pp - 1
    weights = layers if any(layers) else None
    return StageProblem(
        stage=stage,
        chunks=chunks,
        graph=job.graph,
        costs=job.costs.layer,
        in_flight=in_flight(parallel, job.microbatches, stage, weights),
        budget_bytes=job.memory_bytes - job.footprint(stage, sum(layers)).static_bytes,
        forward_slots=forward_slots(parallel),
        backward_slots=backward_slots(parallel),
        has_forward_windows=has_forward_windows(parallel, job.microbatches, stage),
        stall_ns=0 if last and parallel.vpp == 1 else stall_ns,
        head_ns=job.costs.head_window_ns if last else 0,
        workspace_bytes=job.workspace_bytes,
    )


def sim_job(job: Job, stages: Sequence[PlannedStage]) -> SimJob:
    """What the simulator is to run."""
    return SimJob(
        stages=tuple(stage.plan for stage in stages),
        graph=stages[0].graph,
        table=job.costs,
        parallel=job.parallel,
        microbatches=job.microbatches,
        workspace_bytes=job.workspace_bytes,
    )


def _keep(stage: int, chunks: tuple[tuple[int, ...], ...]) -> StagePlan:
    layers = tuple(LayerPlan(layer=layer) for chunk in chunks for layer in chunk)
    return StagePlan(stage=stage, chunks=chunks, layers=layers)


def relabel(plan: StagePlan, chunks: tuple[tuple[int, ...], ...]) -> StagePlan:
    """The same plan for other global layer indices, chunk by chunk."""
    old = [layer for chunk in plan.chunks for layer in chunk]
    names = dict(zip(old, [layer for chunk in chunks for layer in chunk], strict=True))
    layers = []
    for layer in plan.layers:
        choices = tuple(
            (region, replace(c, layer=names[c.layer]) if isinstance(c, Window) and c.layer >= 0 else c)
            for region, c in layer.choices
        )
        layers.append(LayerPlan(layer=names[layer.layer], choices=choices))
    return StagePlan(stage=plan.stage, chunks=chunks, layers=tuple(layers))


class Bench:
    """Plans stages of one job with one planner, and remembers what it planned.

    Stages with the same number of layers in each chunk differ only in the names of their layers,
    so a plan is made once and relabelled.
    """

    def __init__(self, job: Job, planner: str, options: SolveOptions) -> None:
        self.job, self.planner, self.options = job, planner, options
        self._plans: dict[tuple[int, tuple[int, ...], int], PlannedStage | InfeasibleError] = {}
        self._stalls: dict[Split, tuple[int, ...]] = {}

    def stalls(self, split: Split) -> tuple[int, ...]:
        """The steady wait of each stage before a backward, without any recomputation."""
        if split not in self._stalls:
            job, pp = self.job, self.job.parallel.pp
            kept = tuple(_keep(stage, chunks_of(split, pp, stage)) for stage in range(pp))
            run = simulate(
                SimJob(
                    stages=kept,
                    graph=job.graph,
                    table=job.costs,
                    parallel=job.parallel,
                    microbatches=job.microbatches,
                )
            )
            self._stalls[split] = tuple(run.stall_ns(stage) for stage in range(pp))
        return self._stalls[split]

    def stage(self, stage: int, layers: tuple[int, ...], stall_ns: int) -> PlannedStage:
        """Plan rank ``stage`` with so many layers in each chunk, numbered from 0.

        Raises:
            InfeasibleError: with the smallest memory of the device that would do.
        """
        key = (stage, layers, stall_ns)
        if key not in self._plans:
            self._plans[key] = self._solve(stage, layers, stall_ns)
        found = self._plans[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def _solve(self, stage: int, layers: tuple[int, ...], stall_ns: int) -> PlannedStage | InfeasibleError:
        chunks = chunks_of(layers, 1, 0)
        problem = stage_problem(self.job, stage, chunks, stall_ns)
        try:
            return planners.plan(problem, self.planner, self.options)
        except InfeasibleError as error:
            static = self.job.memory_bytes - problem.budget_bytes
            return _whole_device(self.job, error, static, self.planner)

    def whole(self, split: Split) -> tuple[PlannedStage, ...]:
        """Plan all stages of a split.

        Raises:
            InfeasibleError: of the stage that lacks most.
        """
        pp, stalls = self.job.parallel.pp, self.stalls(split)
        found, errors = [], []
        for stage in range(pp):
            chunks = chunks_of(split, pp, stage)
            try:
                planned = self.stage(stage, tuple(map(len, chunks)), stalls[stage])
            except InfeasibleError as error:
                errors.append(error)
                continue
            found.append(replace(planned, plan=relabel(planned.plan, chunks)))
        if errors:
            raise max(errors, key=lambda error: error.needed_bytes)
        return tuple(found)

    def score(self, stages: Sequence[PlannedStage]) -> int:
        """Simulated time of a step, without the optimizer."""
        job = self.job
        times = [sim_stage(s.plan, s.graph, job.costs, job.parallel, job.microbatches) for s in stages]
        return iteration_ns(times, job.parallel, job.microbatches, job.costs.p2p_ns)


def _whole_device(job: Job, error: InfeasibleError, static: int, planner: str) -> InfeasibleError:
    """The error in terms of what the user set: memory of a device, static memory included."""
    needed = static + error.needed_bytes
    budget = f"{-(-needed * 100 // GIB) / 100:.2f}GiB"
    return InfeasibleError(
        f"--planner {planner} does not fit stage {error.stage} into {format_bytes(job.memory_bytes)}: "
        f"it needs {format_bytes(needed)} ({format_bytes(static)} of them static); --budget {budget} "
        f"would fit",
        stage=error.stage,
        budget_bytes=job.memory_bytes,
        needed_bytes=needed,
    )
