"""Checks a plan that was read from a file against the job that is to run it, before anything starts.

A plan may be edited by hand or belong to another job. What the runtime would pass over without a word is
refused here by name: stages, layers and regions that do not exist, and windows that the schedule never
opens, or opens too late. Whether a window is long enough, or the memory large enough, is the planner's
matter: neither can make a result wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

from megatron_lynx.errors import PlanError
from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.job import Job
from megatron_lynx.layers import kind_of, layer_graph
from megatron_lynx.layers.kind import LayerKind
from megatron_lynx.partition.layout import chunks_of, parse_layout
from megatron_lynx.plan import Choice, LayerPlan, Plan, StagePlan, Window, check_job_of
from megatron_lynx.schedule import Turn, turns
from megatron_lynx.spec import Batch, Model, Parallel

Chunks = tuple[tuple[int, ...], ...]
"""Global layer indices of each model chunk of a stage."""


def check_plan(job: Job, plan: Plan) -> None:
    """Check that ``job`` can carry out ``plan``.

    Raises:
        PlanError: as ``check_plan_for``.
    """
    check_plan_for(plan, job.model, job.parallel, job.batch)


def check_plan_for(
    plan: Plan, model: Model, parallel: Parallel, batch: Batch, stages: Sequence[Chunks] | None = None
) -> None:
    """Check that a job of these parts can carry out ``plan``.

    ``stages`` are the layers that each stage of the model really has; without it the plan's own layout is
    what they should be.

    Raises:
        PlanError: names the stage, the layer and the region or window that does not fit.
    """
    graph = layer_graph(model, parallel, batch)
    check_job_of(plan, model, parallel, batch, graph)
    _check_stages(plan, _layout_of(plan, model, parallel) if stages is None else stages)
    for stage in plan.stages:
        place = _Place(
            stage=stage,
            kind=kind_of(model),
            graph=graph,
            parallel=parallel,
            turns=turns(parallel, batch.num_microbatches(parallel.dp), stage.stage),
        )
        for layer in stage.layers:
            place.check(layer)


def _layout_of(plan: Plan, model: Model, parallel: Parallel) -> list[Chunks]:
    """The layers of each stage by the plan's layout, or evenly."""
    ranks = range(parallel.pp)
    if plan.layout is not None:
        layout = parse_layout(plan.layout, parallel.pp)
        return [layout.chunks(rank) for rank in ranks]
    count = parallel.pp * parallel.vpp
    each = [model.num_layers // count] * count
    return [chunks_of(each, parallel.pp, rank) for rank in ranks]


def _check_stages(plan: Plan, stages: Sequence[Chunks]) -> None:
    numbers = [stage.stage for stage in plan.stages]
    if len(numbers) != len(stages):
        raise PlanError(f"the plan has {len(numbers)} stages, the job {len(stages)}")
    if numbers != list(range(len(stages))):
        raise PlanError(f"the plan numbers its stages {numbers}; {list(range(len(stages)))} works")
    for stage, chunks in zip(plan.stages, stages, strict=True):
        if stage.chunks != chunks:
            works = f"; --pipeline-model-parallel-layout '{plan.layout}' works" if plan.layout else ""
            raise PlanError(
                f"the plan gives stage {stage.stage} the layers {_listed(stage.chunks)}, "
                f"the job {_listed(chunks)}{works}"
            )


def _listed(chunks: Chunks) -> str:
    return " | ".join(", ".join(map(str, chunk)) or "none" for chunk in chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A stage with what its layers may name."""

    stage: StagePlan
    kind: LayerKind
    graph: LayerGraph
    parallel: Parallel
    turns: tuple[Turn, ...]

    def check(self, plan: LayerPlan) -> None:
        """Check the choices of one layer."""
        names = [region for region, _ in plan.choices]
        for region, choice in plan.choices:
            if region not in self.graph.names:
                raise self._fault(
                    plan, region, f"there is no such region; {_nearest(region, self.graph.names)}"
                )
            if choice == "keep":
                raise self._fault(plan, region, "a region that is kept is left out")
            if region == INPUT:
                self._check_input(plan, choice)
            elif isinstance(choice, Window):
                self._check_window(plan, region, choice)
        place = [self.graph.names.index(name) for name in names]
        for (before, a), (after, b) in pairwise(zip(names, place, strict=True)):
            if a >= b:
                why = "twice" if a == b else f"after {before}, which runs later"
                raise self._fault(plan, after, f"it is named {why}; forward order works")

    def _fault(self, plan: LayerPlan, what: object, why: str) -> PlanError:
        return PlanError(f"stage {self.stage.stage} layer {plan.layer}: {what}: {why}")

    def _chunk(self, layer: int) -> int:
        return next(n for n, chunk in enumerate(self.stage.chunks) if layer in chunk)

    def _check_input(self, plan: LayerPlan, choice: Choice) -> None:
        """A layer's input is rebuilt by the end of the layer before it, on demand."""
        own = self.stage.chunks[self._chunk(plan.layer)]
        if isinstance(choice, Window):
            raise self._fault(plan, f"{INPUT}={choice}", "it is rebuilt behind a collective; demand works")
        if plan.layer == own[0]:
            raise self._fault(plan, INPUT, "the layer is the first of its model chunk; keep works")
        if self.graph.names[-1] not in self.stage.layer(plan.layer - 1).dropped:
            raise self._fault(
                plan, INPUT, f"layer {plan.layer - 1} keeps {self.graph.names[-1]}; demand works"
            )

    def _check_window(self, plan: LayerPlan, region: str, window: Window) -> None:
        def fault(why: str) -> PlanError:
            return self._fault(plan, f"{region}={window}", why)

        if self.graph.region(region).communicates:
            raise fault("the region communicates, a window is busy with that; demand works")
        chunk = self._chunk(plan.layer)
        if window.kind == "stall":
            if not self.turns[chunk].waits:
                raise fault(f"stage {self.stage.stage} never waits for a gradient; demand works")
        elif window.kind == "head":
            self._check_head(chunk, fault)
        else:
            self._check_own(plan, region, window, chunk, fault)

    def _check_head(self, chunk: int, fault: Callable[[str], PlanError]) -> None:
        last = self.stage.stage == self.parallel.pp - 1 and chunk == len(self.stage.chunks) - 1
        if not last:
            raise fault("only the last stage's last chunk has the head; demand works")
        if self.parallel.tp == 1 or self.parallel.sequence_parallel:
            raise fault("the head opens a window with tensor but no sequence parallelism; demand works")

    def _check_own(
        self, plan: LayerPlan, region: str, window: Window, chunk: int, fault: Callable[[str], PlanError]
    ) -> None:
        """A window of a layer: it exists, serves this chunk, and comes before the need."""
        forward = window.kind == "fwd"
        slots = (self.kind.forward_slots if forward else self.kind.backward_slots)(self.parallel)
        if not slots:
            raise fault("there are no such windows without tensor parallelism; demand works")
        if window.layer not in self.stage.chunks[chunk]:
            own = ", ".join(map(str, self.stage.chunks[chunk]))
            raise fault(f"layer {window.layer} is not beside it; one of {own} works")
        if window.slot not in slots:
            raise fault(f"there is no such window; {_nearest(window.slot, slots)}")
        if window.kind == "fwd":
            if not self.turns[chunk].served:
                raise fault("no forward pass comes right before its backward here; bwd or demand works")
        elif window.layer < plan.layer or (window.layer == plan.layer and self._late(region, window)):
            raise fault("the window opens after the region is needed; demand works")

    def _late(self, region: str, window: Window) -> bool:
        """Whether the backward reads what ``region`` makes before this window of its own layer opens."""
        names = self.graph.names
        readers = [names.index(n) for s in self.graph.produced_by(region) for n in s.saved_by]
        return max(readers, default=-1) >= names.index(window.slot.partition(".")[0])


def _nearest(name: str, known: Iterable[str]) -> str:
    known = tuple(known)
    close = get_close_matches(name, known, n=1, cutoff=0.0)
    return f"{close[0]} works" if close else "keep works"
