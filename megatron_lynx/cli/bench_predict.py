"""What the simulator says of a bench's rows: step time, and the peak that the meter should see.

The peak is walked region by region: what the plan holds at each moment (``fine`` accounting, which
is what the runtime does), and on top of it the measured working set of the region at work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lynx.cost import CostTable
from megatron_lynx.job import Job, make_job
from megatron_lynx.layers import kind_of
from megatron_lynx.plan import Plan, parse_plan
from megatron_lynx.search.given import graph_of
from megatron_lynx.search.workflow import check_plan
from megatron_lynx.simulator import passes
from megatron_lynx.simulator.engine import SimJob, simulate
from megatron_lynx.simulator.passes import Delta
from megatron_lynx.simulator.timeline import Timeline
from megatron_lynx.spec import Batch, Model, Parallel

Sets = Mapping[str, Mapping[str, int]]
"""Working sets in bytes: ``forward`` and ``backward`` by region, ``ends`` by end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step in nanoseconds (the optimizer included), the fullest rank's peak in bytes, and the
    recomputation that windows and stalls hide or leave exposed, over all ranks."""

    step_ns: int
    peak_bytes: int
    hidden_ns: int
    exposed_ns: int


class Predictor:
    """Predicts the rows of one case."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        parts = result["job"]
        self.job: Job = make_job(
            Model(**parts["model"]),
            Parallel(**parts["parallel"]),
            Batch(**parts["batch"]),
            costs=CostTable.from_json(json.dumps(result["costs"]), "bench"),
            memory_bytes=1 << 60,
        )
        self.outside_ns: int = result["outside_ns"]
        self.sets: Sets = result["working_sets"]

    def predict(self, text: str) -> Prediction:
        """The prediction for a plan in text form."""
        plan = parse_plan(text)
        check_plan(self.job, plan)
        timeline = simulate(
            SimJob(
                stages=plan.stages,
                graph=graph_of(self.job, plan),
                table=self.job.costs,
                parallel=self.job.parallel,
                microbatches=self.job.microbatches,
                fine=True,
            )
        )
        totals = [timeline.totals_ns(stage.stage) for stage in plan.stages]
        return Prediction(
            step_ns=timeline.makespan_ns + self.outside_ns,
            peak_bytes=max(self._peak(timeline, plan, stage.stage) for stage in plan.stages),
            hidden_ns=sum(t.get(passes.HIDDEN, 0) + t.get(passes.STALL, 0) for t in totals),
            exposed_ns=sum(t.get(passes.EXPOSED, 0) for t in totals),
        )

    @property
    def _mask_bytes(self) -> int:
        """The attention mask of a microbatch, where it comes with the data."""
        batch = self.job.batch
        return batch.micro_batch_size * batch.seq_length**2 if self.job.model.mask_from_data else 0

    def _checkpoint_bytes(self, plan: Plan) -> int:
        """What Megatron's checkpoint function holds besides while a layer's backward runs: the layer's
        output, made again, and its gradient."""
        if not plan.planner.startswith("full-"):
            return 0
        return 2 * next(s.size_bytes for s in self.job.graph.storages if s.name == "input")

    def _peak(self, timeline: Timeline, plan: Plan, stage: int) -> int:
        """The meter's peak on one rank."""
        forward, backward, ends = (self.sets[name] for name in ("forward", "backward", "ends"))
        own = self.job.footprint(stage, len(plan.stages[stage].layers))
        checkpoint = self._checkpoint_bytes(plan)
        # The linear that needs least needs little more than the gradients that are alive all the time.
        gradients = min(backward.get(name, 0) for name in kind_of(self.job.model).gemms())
        again = {layer.layer for layer in plan.stages[stage].layers if layer.dropped}
        held, best = own.embedding_bytes + self._mask_bytes, 0
        for run in timeline.runs[stage]:
            inside = timeline.inside(run)
            if not run.action.forward and stage == self.job.parallel.pp - 1:
                best = max(best, held + ends.get("head", 0))
            for delta, busy in _with_region_at_work((*inside.early_deltas, *inside.body_deltas), backward):
                besides = checkpoint if delta.layer in again and not run.action.forward else 0
                if delta.size_bytes < 0:  # the backward of a region ends: it was at work until now
                    best = max(best, held + besides + backward.get(delta.name, 0))
                held += delta.size_bytes
                if delta.size_bytes > 0:
                    more = 0 if run.action.forward else besides + max(gradients, busy)
                    best = max(best, held + more + forward.get(delta.name, 0))
            if run.action.forward and stage == 0:
                best = max(best, held + ends.get("embedding", 0) * (not best))
        return best


def _with_region_at_work(deltas: Sequence[Delta], backward: Mapping[str, int]) -> Iterator[tuple[Delta, int]]:
    """Each delta, and for what a window of a backward rebuilds the working set of the region whose
    backward waits there: the next one that ends."""
    busy, found = 0, list[tuple[Delta, int]]()
    for delta in reversed(deltas):
        if delta.size_bytes < 0:
            busy = backward.get(delta.name, busy)
        found.append((delta, busy if delta.owner == passes.IN_BACKWARD else 0))
    return reversed(found)
