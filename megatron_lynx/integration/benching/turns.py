"""The bench inside a training process: every method on one model, interleaved step by step.

Megatron's own trainer starts as in any run. Its first call of ``train_step`` is answered here: the
same function is called again and again with the same model, optimizer and data, each time under
another method, and then training ends. Each method first runs under the storage meter (which also
warms it up), then all of them take turns, so that what disturbs the machine disturbs all alike.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_args, training

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import InfeasibleError
from megatron_lynx.integration.agree import from_rank_0, gathered
from megatron_lynx.integration.benching.methods import Lynx, Stock, dropping, without_windows
from megatron_lynx.integration.describe import batch_of, model_of, parallel_of
from megatron_lynx.integration.measuring.layer import agreed, measure
from megatron_lynx.integration.measuring.memory import with_workspaces, working_sets
from megatron_lynx.integration.windows import Hooks
from megatron_lynx.job import Job, make_job
from megatron_lynx.layers import kind_of, layer_graph
from megatron_lynx.plan import Plan, parse_plan
from megatron_lynx.profiler.measure import timed
from megatron_lynx.profiler.meter import StorageMeter
from megatron_lynx.search.workflow import plan_job

SCHEMA = 2
FITTINGS = 3
"""How often a plan is made anew when the meter disagrees with the budget by more than ``CLOSE``."""
CLOSE = 0.01
PLANNING_S = 12.0
"""What one plan by ``opt`` may take: there is one for each budget and fitting."""
PROFILES = 3
"""Profiles before planning; another one follows each round."""
FEWEST_ROUNDS, MOST_ROUNDS = 3, 15


class BenchFinished(Exception):  # noqa: N818 (it is not an error)
    """Leaves Megatron's trainer when everything has been measured."""


@dataclass(slots=True)
class Method:
    """One row of the bench, and what was measured for it on this rank.

    ``target_bytes`` is the budget of activations that its plan was made for. Times are in
    nanoseconds, one entry a step: ``step_ns`` of the whole step, ``schedule_ns`` without the
    optimizer. ``rebuilt`` counts storages by place, ``work_ns`` is host time spent in windows.
    """

    name: str
    kind: str
    run: Stock | Lynx
    plan: Plan | None = None
    target_bytes: int | None = None
    step_ns: list[int] = field(default_factory=list)
    schedule_ns: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float | None = None
    rebuilt: dict[str, int] = field(default_factory=dict)
    work_ns: int = 0

    def facts(self) -> dict[str, Any]:
        """This rank's part of the row, as JSON values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "plan": None if self.plan is None else str(self.plan),
            "target_bytes": self.target_bytes,
            "step_ns": self.step_ns,
            "schedule_ns": self.schedule_ns,
            "peak_bytes": self.peak_bytes,
            "rebuilt_storages": self.rebuilt,
            "window_work_ns": self.work_ns,
        }


@contextlib.contextmanager
def bench_instead_of_training(request: dict[str, Any], folder: Path, hooks: Hooks) -> Iterator[None]:
    """Inside, Megatron's trainer runs the bench that ``request`` describes and then stops by
    raising ``BenchFinished``; rank 0 writes ``folder/result.json``."""
    original = training.train_step

    def bench_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        config: Any,
        forward_backward_func: Callable[..., Any],
        **more: Any,
    ) -> Any:
        def step(schedule: Callable[..., Any]) -> Any:
            arguments = (forward_step_func, data_iterator, model, optimizer, scheduler, config)
            return original(*arguments, schedule, **more)

        InTrainer(request, folder, hooks, model, step, forward_backward_func).run()
        raise BenchFinished

    training.train_step = bench_step
    try:
        yield
    finally:
        training.train_step = original


class InTrainer:
    """One bench: the methods of ``request`` on the model that the trainer has built."""

    def __init__(
        self,
        request: dict[str, Any],
        folder: Path,
        hooks: Hooks,
        model: Sequence[Any],
        step: Callable[[Callable[..., Any]], Any],
        schedule: Callable[..., Any],
    ) -> None:
        args = get_args()
        self.request, self.folder, self.hooks = request, folder, hooks
        self.chunks = unwrap_model(model)
        self._step, self._schedule = step, schedule
        self.parallel, self.batch = parallel_of(args), batch_of(args)
        device = next(self.chunks[0].parameters()).device
        self.model = model_of(args, get_model_config(self.chunks[0]), device)
        self.rank = torch.distributed.get_rank()
        self.methods: list[Method] = []
        self.table: CostTable
        self.tables: list[CostTable] = []
        self.outside_ns: list[int] = []
        self._losses: Any = None
        self.working: dict[str, dict[str, int]] = {}
        self.started_s = time.monotonic()

    def run(self) -> None:
        """Measure costs, make the methods, meter them, time them with costs between, write the result."""
        for _ in range(PROFILES):
            self._profile()
        graph = layer_graph(self.model, self.parallel, self.batch)
        self.working = working_sets(self.chunks, self.model, self.parallel, self.batch, graph)
        self.table = with_workspaces(CostTable.median(self.tables), self.working, graph)
        self._say(f"costs measured in {time.monotonic() - self.started_s:.0f} s")
        for method in self._stock_methods():
            self._meter(method)
            self.methods.append(method)
        self._add_lynx_methods()
        self._write(self._rounds())

    def _profile(self) -> None:
        """Measure what a layer, the ends and the links cost now."""
        self.tables.append(agreed(measure(self.chunks, self.model, self.parallel, self.batch)))

    def _time_outside(self) -> None:
        """One step without its schedule: gradients set to zero, their norm, the optimizer."""
        empty = partial(self._step, lambda **_: self._losses)
        self.outside_ns.append(timed(empty, torch.distributed.barrier)[1])

    # --- the methods ---------------------------------------------------------------------------

    def _stock_methods(self) -> list[Method]:
        job = self._job(1 << 60)
        base = self._planned(job, "none")
        layers = max(len(chunk) for stage in base.stages for chunk in stage.chunks)
        found = [Method("none", "stock", Stock(), base)]
        for name in self.request["stock"]:
            if name == "full":
                run = Stock(granularity="full", method="uniform", num_layers=1)
                found.append(Method("full-uniform-1", "stock", run, self._planned(job, "full-uniform-1")))
            elif name == "block":
                for k in self.request.get("block") or range(1, layers):
                    run = Stock(granularity="full", method="block", num_layers=k)
                    plan = self._planned(job, f"full-block-{k}")
                    found.append(Method(f"full-block-{k}", "stock", run, plan))
            elif name == "selective":
                run = Stock(granularity="selective", modules=("core_attn",))
                found.append(Method("selective", "stock", run, self._planned(job, "selective")))
            elif self.model.add_bias_linear:
                continue  # both that follow recompute the MLP: see MLP_WITH_BIAS
            elif name == "mlp":
                run = Stock(granularity="selective", modules=("mlp",))
                plan = dropping(base, "modules-mlp", kind_of(self.model).recompute_modules[name])
                found.append(Method("modules mlp", "stock", run, plan))
            elif name == "core_attn+mlp":
                run = Stock(granularity="selective", modules=("core_attn", "mlp"))
                found.append(Method("modules core_attn mlp", "stock", run))
        return found

    def _job(self, memory_bytes: int) -> Job:
        return make_job(self.model, self.parallel, self.batch, costs=self.table, memory_bytes=memory_bytes)

    def _planned(self, job: Job, planner: str) -> Plan:
        return parse_plan(from_rank_0(lambda: str(plan_job(job, planner, time_limit_s=PLANNING_S).plan)))

    def _add_lynx_methods(self) -> None:
        """Plans of named planners without a budget and given plans, then the planner's own for each
        budget; each of the latter that uses windows a second time with its windows off."""
        for name, planner in self.request.get("planners", {}).items():
            plan = self._planned(self._job(1 << 60), planner)
            self.methods.append(Method(name, "lynx", self._lynx(plan), plan))
            self._meter(self.methods[-1])
        for name, text in self.request.get("plans", {}).items():
            plan = parse_plan(text)
            self.methods.append(Method(f"lynx {name}", "lynx", self._lynx(plan), plan))
            self._meter(self.methods[-1])
        peaks = {method.name: method.peak_bytes for method in self.methods}
        none, full = peaks["none"], peaks.get("full-uniform-1", 0)
        for label in self.request["budgets"]:
            share = float(label.rstrip("%+"))
            target = round(full * (1 + share / 100)) if label.endswith("%+") else round(none * share / 100)
            name = f"lynx full+{share:g}%" if label.endswith("%+") else f"lynx {share:g}%"
            method = self._fitted(name, target)
            if method is None:
                self._say(f"{name}: no plan fits {target} bytes")
                continue
            self.methods.append(method)
            assert method.plan is not None
            bare = without_windows(method.plan)
            if bare.stages == method.plan.stages:
                continue  # the same plan: it has no window to switch off
            demand = Method(f"{name}, windows off", "demand", self._lynx(bare), bare, target)
            self._meter(demand)
            self.methods.append(demand)

    def _lynx(self, plan: Plan) -> Lynx:
        stage = torch.distributed.get_rank() // self.parallel.tp % self.parallel.pp
        graph = layer_graph(self.model, self.parallel, self.batch)
        return Lynx(stage=plan.stages[stage], parallel=self.parallel, graph=graph, hooks=self.hooks)

    def _fitted(self, name: str, target: int) -> Method | None:
        """A plan whose metered peak is at most ``target``: planned for it, metered, and planned again
        for less (or more) where the meter disagrees. None if nothing fits."""
        budget, best = target, None
        for attempt in range(1 + FITTINGS):
            try:
                plan = self._planned(self._job(self._memory_bytes(budget)), self.request["planner"])
            except InfeasibleError:
                return best
            method = Method(name, "lynx", self._lynx(plan), plan, target)
            self._meter(method)
            if method.peak_bytes <= target and (best is None or best.peak_bytes < method.peak_bytes):
                best = method
            if target * (1 - CLOSE) <= method.peak_bytes <= target:
                break
            budget += (target - method.peak_bytes) * (1 + attempt)
        return best

    def _memory_bytes(self, activations: int) -> int:
        """Memory of a device that leaves so many bytes for what the meter counts.

        The meter counts the embedding's saved mask, which a plan's budget does not.
        """
        job = self._job(1 << 60)
        first = job.footprint(0, len(self._planned_layers(0)))
        return first.static_bytes - first.embedding_bytes + activations

    def _planned_layers(self, stage: int) -> list[int]:
        plan = self.methods[0].plan
        assert plan is not None
        return [layer.layer for layer in plan.stages[stage].layers]

    # --- steps ---------------------------------------------------------------------------------

    def _active(self, method: Method) -> contextlib.AbstractContextManager[Any]:
        if isinstance(method.run, Stock):
            return method.run.active(self.chunks)
        return method.run.active(self.chunks, lambda record: self._note(method, record))

    def _note(self, method: Method, record: Any) -> None:
        method.rebuilt = dict(record.rebuilt_storages)
        method.work_ns = sum(record.window_work_ns.values())

    def _meter(self, method: Method) -> None:
        """One step under the meter: the peak of this rank, then the largest of all ranks."""
        meter = StorageMeter()

        def metered(*args: Any, **kwargs: Any) -> Any:
            with meter:
                self._losses = schedule(*args, **kwargs)
            return self._losses

        gc.collect()
        with self._active(method) as wrap:
            schedule = wrap(self._schedule)
            result = self._step(metered)
        method.peak_bytes = max(gathered(meter.peak_bytes))
        loss = result[0].get("lm loss")
        method.loss = None if loss is None else float(loss)
        self._say(f"{method.name}: peak {method.peak_bytes / 1e6:.1f} MB")

    def _time(self, method: Method) -> None:
        """One timed step, from a barrier to the end of the optimizer on this rank."""
        inside: list[int] = []

        def noted(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            out = schedule(*args, **kwargs)
            torch.cuda.synchronize()
            inside.append(time.perf_counter_ns() - start)
            return out

        gc.collect()
        with self._active(method) as wrap:
            schedule = wrap(self._schedule)
            torch.cuda.synchronize()
            method.step_ns.append(timed(partial(self._step, noted), torch.distributed.barrier)[1])
        method.schedule_ns.append(inside[0])

    def _rounds(self) -> int:
        """Let all methods take their turn, as often as was asked for or as fits into the time that is
        left; each round begins with another method and ends with a profile, since the machine's speed
        drifts. Returns the number of rounds."""
        rounds, done = int(self.request.get("rounds") or 0), 0
        while done < (rounds or FEWEST_ROUNDS):
            started = time.monotonic()
            first = done * 7 % len(self.methods)
            for method in self.methods[first:] + self.methods[:first]:
                self._time(method)
            self._profile()
            self._time_outside()
            done += 1
            if not rounds:
                left = float(self.request["seconds"]) - (time.monotonic() - self.started_s)
                more = int(left / max(1e-3, time.monotonic() - started))
                text = from_rank_0(partial(str, min(MOST_ROUNDS, max(FEWEST_ROUNDS, 1 + more))))
                rounds = int(text)
            self._say(f"round {done} of {rounds}")
        return done

    # --- the result ----------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self.rank == 0:
            with (self.folder / "progress.txt").open("a") as file:
                file.write(text + "\n")

    def _write(self, rounds: int) -> None:
        """Gather what every rank measured; a step takes as long as its slowest rank."""
        everyone = gathered([method.facts() for method in self.methods])
        outside = gathered(statistics.median(self.outside_ns))
        working_all = gathered(self.working)
        if self.rank != 0:
            return
        working = {key: {} for key in self.working}  # type: dict[str, dict[str, int]]
        for one in working_all:
            for key, sizes in one.items():
                for name, size in sizes.items():
                    working[key][name] = max(size, working[key].get(name, 0))
        rows = []
        for parts in zip(*everyone, strict=True):
            row = dict(parts[0])
            for times in ("step_ns", "schedule_ns"):
                row[times] = [max(step) for step in zip(*(part[times] for part in parts), strict=True)]
            places: Counter[str] = Counter()
            for part in parts:
                places.update(part["rebuilt_storages"])
            row["rebuilt_storages"] = dict(places)
            rows.append(row)
        costs = replace(CostTable.median(self.tables), workspace_bytes=self.table.workspace_bytes)
        whole = {
            "schema": SCHEMA,
            "rounds": rounds,
            "job": {n: asdict(getattr(self, n)) for n in ("model", "parallel", "batch")},
            "costs": json.loads(costs.to_json()),
            "outside_ns": round(max(outside)),
            "working_sets": working,
            "rows": rows,
        }
        partial = self.folder / "result.partial"
        partial.write_text(json.dumps(whole, indent=1) + "\n")
        partial.rename(self.folder / "result.json")
