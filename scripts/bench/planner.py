"""How long the planners take for one stage, and how far from the optimum they end.

    python scripts/bench/planner.py [--quick] [--layers 12 24] [--limit 30]

HEU is timed on stages of many shapes; OPT (and ``mixed``, on its way) on a 7B stage at TP=4 with
1 to 8 microbatches in flight and a budget at 10, 25 and 50 % of the range between recomputing
everything and nothing. Times are of this machine, one solver thread.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.estimate import estimate_costs
from megatron_lynx.layers import kind_of
from megatron_lynx.planner import SolveOptions, StageProblem, plan
from megatron_lynx.planner.result import SolveReport
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.schedule import Turn
from megatron_lynx.spec import Batch, Parallel

CLUSTERS = ("a100-40g-nvlink", "a100-40g-pcie")
SHARES = (0.1, 0.25, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A stage: what decides its graph and its costs."""

    model: str = "gpt-7b"
    cluster: str = CLUSTERS[0]
    tp: int = 4
    sequence_parallel: bool = False
    micro_batch_size: int = 8
    seq_length: int = 1024
    attention: str = "flash"
    layers: int = 12
    in_flight: int = 4
    stall_ns: int = 0


def stage_problem(shape: Shape) -> StageProblem:
    """The problem of a middle stage, with memory without end."""
    model = load_model(shape.model, attention=shape.attention)
    parallel = Parallel(tp=shape.tp, pp=4, sequence_parallel=shape.sequence_parallel)
    batch = Batch(
        seq_length=shape.seq_length,
        micro_batch_size=shape.micro_batch_size,
        global_batch_size=16 * shape.micro_batch_size,
    )
    kind, costs = kind_of(model), estimate_costs(model, parallel, batch, load_cluster(shape.cluster))
    return StageProblem(
        stage=1,
        chunks=(tuple(range(shape.layers)),),
        graph=kind.graph(model, parallel, batch),
        costs=costs.layer,
        turns=(Turn(moments=((shape.in_flight,),)),),
        budget_bytes=1 << 60,
        forward_slots=kind.forward_slots(parallel),
        backward_slots=kind.backward_slots(parallel),
        stall_ns=shape.stall_ns,
        workspace_bytes=kind.workspace_bytes(model, parallel, batch),
        recompute_modules=kind.recompute_modules,
    )


def budgets(shape: Shape) -> Iterator[StageProblem]:
    """The stage with budgets between recomputing all and nothing."""
    problem = stage_problem(shape)
    low, high = (plan(problem, name).report.peak_bytes for name in ("tail-free", "none"))
    for share in SHARES:
        yield replace(problem, budget_bytes=round(low + share * (high - low)))


def heu_shapes(quick: bool) -> Iterator[Shape]:
    """Stages of all sizes for HEU."""
    models = ("gpt-7b",) if quick else ("gpt-1.3b", "gpt-7b", "gpt-20b", "llama3-8b")
    for model, cluster, tp, sp, attention in itertools.product(
        models, CLUSTERS, (2, 8), (False, True), ("flash", "unfused")
    ):
        yield Shape(
            model=model, cluster=cluster, tp=tp, sequence_parallel=sp, attention=attention, micro_batch_size=4
        )


def opt_shapes(layers: int, quick: bool) -> Iterator[Shape]:
    """The stages for OPT."""
    for cluster, in_flight, stall in itertools.product(
        CLUSTERS, (2, 8) if quick else (1, 2, 4, 8), (0, 5_000_000)
    ):
        yield Shape(cluster=cluster, layers=layers, in_flight=in_flight, stall_ns=stall)


Measured = tuple[SolveReport, float]


def measure(problems: Iterable[StageProblem], planner: str, options: SolveOptions) -> list[Measured]:
    """Reports of a planner on every problem that it can solve, and its CPU seconds."""
    found = []
    for problem in problems:
        begun = time.process_time()
        try:
            report = plan(problem, planner, options).report
        except InfeasibleError:
            continue
        found.append((report, time.process_time() - begun))
    return found


def show(title: str, measured: list[Measured]) -> None:
    """One row of the table."""
    wall = sorted(report.wall_ns / 1e6 for report, _ in measured)
    cpu = sorted(1e3 * seconds for _, seconds in measured)
    proven = sum(report.status == "optimal" for report, _ in measured)
    gap = max(report.gap for report, _ in measured)
    late = wall[min(len(wall) - 1, round(0.95 * len(wall)))]
    print(
        f"{title:<16} {len(wall):>4} {statistics.median(wall):>10.1f} {statistics.median(cpu):>10.1f} "
        f"{statistics.mean(wall):>10.1f} {late:>10.1f} {wall[-1]:>10.1f} {proven:>7} {100 * gap:>9.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24], help="stage sizes for OPT")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds a stage for OPT")
    arguments = parser.parse_args()
    options = SolveOptions(time_limit_s=arguments.limit)
    print(f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}; solver threads: 1")
    print(
        f"{'planner, layers':<16} {'n':>4} {'median ms':>10} {'(cpu)':>10} {'mean ms':>10} {'p95 ms':>10} "
        f"{'max ms':>10} "
        f"{'proven':>7} {'max gap %':>9}"
    )
    stages = [problem for shape in heu_shapes(arguments.quick) for problem in budgets(shape)]
    show("heu, 12", measure(stages, "heu", options))
    for layers in arguments.layers:
        stages = [problem for shape in opt_shapes(layers, arguments.quick) for problem in budgets(shape)]
        for planner in ("checkmate", "mixed", "opt"):
            show(f"{planner}, {layers}", measure(stages, planner, options))


if __name__ == "__main__":
    main()
