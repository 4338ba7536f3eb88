"""Planned: a job with a plan for every stage, and the numbers of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.job import Job
from megatron_lynx.partition.layout import Layout
from megatron_lynx.plan import Plan, fingerprint
from megatron_lynx.planner import PlannedStage
from megatron_lynx.schedule import in_flight
from megatron_lynx.search.given import timeline_of
from megatron_lynx.search.hosts import host_ns
from megatron_lynx.search.rows import Row, StageRow
from megatron_lynx.search.splits import given_split
from megatron_lynx.search.stages import Split, StagePlans
from megatron_lynx.search.throughput import mfu, tflops_per_gpu
from megatron_lynx.simulator.timeline import Timeline
from megatron_lynx.spec import job_facts

_ONE_NUMBER = ("full-uniform", "full-block")
"""Methods with a number that Megatron has once for all stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A planned job: the plan, and what each stage's planner reported.

    ``simulated_ns`` is from the first forward to the last backward; ``iteration_ns`` adds the
    optimizer's step. ``host_bound`` says that the device waits for the host, and ``iteration_ns`` is
    what that takes.
    """

    job: Job
    plan: Plan
    stages: tuple[PlannedStage, ...]
    simulated_ns: int
    iteration_ns: int
    host_bound: bool = False

    def timeline(self) -> Timeline:
        """Simulate the step in full."""
        return timeline_of(self.job, self.plan)

    def row(self, method: str | None = None) -> Row:
        """The numbers of this plan."""
        return Row(
            method=method or self.plan.planner,
            planner=self.plan.planner,
            fits=True,
            iteration_ns=self.iteration_ns,
            tokens_per_second=self.job.tokens * 1e9 / self.iteration_ns,
            tflops_per_gpu=tflops_per_gpu(self.job, self.iteration_ns),
            mfu=mfu(self.job, self.iteration_ns),
            host_bound=self.host_bound,
            layout=self.plan.layout,
            stages=tuple(_stage_row(self.job, stage) for stage in self.stages),
        )


def _stage_row(job: Job, planned: PlannedStage) -> StageRow:
    plan, report = planned.plan, planned.report
    layers = tuple(layer for chunk in plan.chunks for layer in chunk)
    footprint = job.footprint(plan.stage, len(layers))
    costs, first, last = job.costs, plan.stage == 0, plan.stage == job.parallel.pp - 1
    weights = tuple(map(len, plan.chunks)) if layers else None
    return StageRow(
        stage=plan.stage,
        layers=layers,
        in_flight=sum(in_flight(job.parallel, job.microbatches, plan.stage, weights)),
        static_bytes=footprint.static_bytes,
        kept_bytes=report.kept_bytes,
        rebuilt_bytes=report.rebuilt_bytes,
        peak_bytes=footprint.static_bytes + report.peak_bytes,
        forward_ns=len(layers) * costs.layer.layer_forward_ns
        + (costs.embedding_forward_ns if first else 0)
        + (costs.head_forward_ns if last else 0),
        backward_ns=len(layers) * costs.layer.layer_backward_ns
        + (costs.embedding_backward_ns if first else 0)
        + (costs.head_backward_ns if last else 0),
        recompute_hidden_ns=report.hidden_ns,
        recompute_exposed_ns=report.exposed_ns,
        parameters=footprint.parameters,
    )


def _one_number(bench: StagePlans, method: str, split: Split) -> str:
    """Megatron's full recomputation has one number for all stages: the smallest that fits them all.

    Each stage alone would do with its own; the largest of those is where the search begins.

    Raises:
        InfeasibleError: no number fits.
    """
    alone = bench.whole(split, method)
    number = max(int(stage.report.planner.rpartition("-")[2]) for stage in alone)
    while True:
        try:
            bench.whole(split, f"{method}-{number}")
        except InfeasibleError:
            if number >= max(split):
                raise
            number += 1
            continue
        return f"{method}-{number}"


def assemble(bench: StagePlans, planner: str, split: Split) -> Planned:
    """Plan every stage of a split and put the parts together."""
    job = bench.job
    if planner in _ONE_NUMBER:
        planner = _one_number(bench, planner, split)
    local = bench.best(split, planner)
    stages = bench.placed(split, local)
    layout = job.layout
    if split != given_split(job) or (layout is None and len(set(split)) > 1):
        layout = str(Layout.from_counts(split, job.parallel.pp, job.model.mtp_num_layers))
    device_ns, waited_ns = bench.iteration(local), host_ns(bench.job, local)
    whole = Plan(
        planner=planner,
        fingerprint=fingerprint(job.model, job.parallel, job.batch, job.graph),
        job=job_facts(job.model, job.parallel, job.batch),
        layout=layout,
        stages=tuple(stage.plan for stage in stages),
    )
    return Planned(
        job=job,
        plan=whole,
        stages=stages,
        simulated_ns=bench.score(local),
        iteration_ns=max(device_ns, waited_ns),
        host_bound=waited_ns > device_ns,
    )
