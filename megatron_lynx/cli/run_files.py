"""Reads what ``--lynx-report DIR`` wrote, and lines it up with what was planned.

Counts and times are means over the steps that count, and over the ranks of a stage. Times of windows
are means of one opening. A value that is not known is None.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from megatron_lynx.cli.explain import read_plan
from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError
from megatron_lynx.hardware import Cluster
from megatron_lynx.job import Job, make_job
from megatron_lynx.plan import Plan, StagePlan, Window, parse_choice
from megatron_lynx.schedule import Action, actions, serves, waits_for_gradient
from megatron_lynx.search.given import graph_of, timeline_of
from megatron_lynx.simulator import passes as kinds
from megatron_lynx.simulator.timeline import Timeline
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel

SCHEMA = 3
"""The schema of a report's lines that is read here."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run: its job and plan, and the steps of each stage (of all its ranks) that count.

    The first ``skipped`` steps of each rank do not; ``counted`` do. ``run`` of ``runs`` (the last, if
    no other was asked for) is meant; ``iterations`` are its first and last; ``missing`` the ranks that
    wrote nothing in it, ``ahead`` those that made more steps than others: it was killed or still runs.
    """

    job: Job
    plan: Plan
    timeline: Timeline
    steps: tuple[tuple[Json, ...], ...]
    skipped: int
    counted: int
    run: str
    runs: tuple[str, ...]
    iterations: tuple[int, int]
    missing: tuple[int, ...]
    ahead: tuple[int, ...]


def read_report(
    folder: Path,
    *,
    skip: int = 1,
    run: str | None = None,
    profile: CostTable | None = None,
    cluster: Cluster | None = None,
) -> Report:
    """Read a folder; the first ``skip`` steps of each rank do not count if there are more.

    ``run`` is one of the runs that wrote there, by default the last. ``profile`` or ``cluster`` price
    the plan where the run did not write its costs.

    Raises:
        ConfigError: a file is missing, malformed or of another schema.
        PlanError: the plan does not fit the job.
    """
    if not folder.is_dir():
        raise ConfigError(f"DIR {str(folder)!r} is no folder; the one given to --lynx-report works")
    place, run, runs = _place(folder, run)
    plan = read_plan(str(place / "plan.txt"))
    costs = profile
    if costs is None and cluster is None:
        costs = _costs(place / "costs.json")
    ranks, job = _job(place / "job.json", costs, cluster)
    owner = {layer.layer: stage.stage for stage in plan for layer in stage.layers}
    by_rank = {
        int(path.name.split(".")[1]): _lines(path, run) for path in sorted(folder.glob("steps.*.jsonl"))
    }
    by_rank = {rank: lines for rank, lines in sorted(by_rank.items()) if lines}
    if not by_rank:
        raise ConfigError(f"DIR {str(folder)!r} holds no steps of run {run}; a run that has made one works")
    found: list[list[Json]] = [[] for _ in plan]
    left_out = counted = 0
    for lines in by_rank.values():
        held = next((owner[int(layer)] for line in lines for layer in line["kept_bytes"]), 0)
        held = lines[-1].get("stage", held)  # a stage may have no layers to know it by
        left_out = skip if len(lines) > skip else 0
        counted = len(lines) - left_out
        found[held] += lines[left_out:]
    fewest = min(map(len, by_rank.values()))
    iterations = [line["iteration"] for lines in by_rank.values() for line in lines]
    return Report(
        job=job,
        plan=plan,
        timeline=timeline_of(job, plan),
        steps=tuple(map(tuple, found)),
        skipped=left_out,
        counted=counted,
        run=run,
        runs=runs,
        iterations=(min(iterations), max(iterations)),
        missing=tuple(rank for rank in range(ranks) if rank not in by_rank),
        ahead=tuple(rank for rank, lines in by_rank.items() if len(lines) > fewest),
    )


def _place(folder: Path, run: str | None) -> tuple[Path, str, tuple[str, ...]]:
    """Where job and plan of a run lie, its name, and the names of all runs, oldest first."""
    path = folder / "job.json"
    last = str(_json(path, path.read_text("utf-8") if path.exists() else "").get("run"))
    runs = (*sorted(place.parent.name for place in folder.glob("earlier/*/job.json")), last)
    if run is None or run == last:
        return folder, last, runs
    if run not in runs:
        raise ConfigError(f"--run {run!r} did not write into {str(folder)!r}; {', '.join(runs)} works")
    return folder / "earlier" / run, run, runs


def _costs(path: Path) -> CostTable:
    if not path.exists():
        raise ConfigError(
            f"DIR holds no {path.name}, as its plan came from --lynx-plan; --profile FILE or --cluster NAME "
            "prices the plan"
        )
    return CostTable.from_json(path.read_text("utf-8"), str(path))


def _job(path: Path, costs: CostTable | None, cluster: Cluster | None) -> tuple[int, Job]:
    """How many ranks wrote, and the job."""
    facts = _json(path, path.read_text("utf-8") if path.exists() else "")
    try:
        return facts["ranks"], make_job(
            Model(**facts["model"]),
            Parallel(**facts["parallel"]),
            Batch(**facts["batch"]),
            costs=costs,
            cluster=cluster if costs is None else None,
            memory_bytes=facts["memory_bytes"] if costs is not None else None,
            layout=facts["layout"],
            optimizer=Optimizer(**facts["optimizer"]),
            check_split=False,
            counted=tuple((int(all_), int(trained)) for all_, trained in facts.get("counted", ())),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a job ({error!r}); --lynx-report writes one") from error


def _json(path: Path, text: str) -> Json:
    try:
        data: Json = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {data['schema']} is unknown; {SCHEMA} works")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not fit ({error!r}); --lynx-report writes it") from error
    return data


def _lines(path: Path, run: str) -> list[Json]:
    """The complete lines of a run in a file; it may still be writing."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    every = [_json(path, line) for line in lines if line.endswith("\n")]
    return [line for line in every if line["run"] == run]


def measured(report: Report) -> Json:
    """Planned beside measured, stage by stage."""
    clock = next(line["clock"] for lines in report.steps for line in lines)
    whose = "events on the device" if clock == "device" else "the host\u2019s clock"
    note = (
        f"Means over {report.counted} steps of each rank (the first {report.skipped} left out), by {whose}. "
        "Planned times are from the costs that the plan was made from."
    )
    first, last = report.iterations
    return {
        "note": note,
        "run": report.run,
        "runs": list(report.runs),
        "iterations": [first, last],
        "missing_ranks": list(report.missing),
        "clock": clock,
        "stages": [
            {"stage": stage.stage, "sums": _sums(report, stage), "windows": _windows(report, stage)}
            for stage in report.plan
            if report.steps[stage.stage]
        ],
    }


def _sums(report: Report, stage: StagePlan) -> list[Json]:
    lines, totals = report.steps[stage.stage], report.timeline.totals_ns(stage.stage)
    graph = graph_of(report.job, report.plan)

    def row(name: str, unit: str, color: str, planned: int, values: Iterable[float]) -> Json:
        return {"name": name, "unit": unit, "color": color, "planned": planned, "measured": median(values)}

    def over(line: Json, part: str, field: str) -> int:
        return sum(one[field] for one in line[part].values())

    hidden = totals[kinds.HIDDEN] + totals[kinds.STALL]
    kept = sum(graph.kept_bytes(layer.dropped) for layer in stage.layers)
    return [
        row("schedule", "ns", "--backward", report.timeline.makespan_ns, (x["step_ns"] for x in lines)),
        row(
            "rebuilt in windows", "ns", "--in-forward", hidden, (over(x, "windows", "work_ns") for x in lines)
        ),
        row(
            "rebuilt on demand",
            "ns",
            "--recompute-exposed",
            totals[kinds.EXPOSED],
            (over(x, "demand", "time_ns") for x in lines),
        ),
        row("kept by a microbatch", "bytes", "--kept", kept, (sum(x["kept_bytes"].values()) for x in lines)),
    ]


Group = tuple[str, str]
"""Kind and slot: the same window of every layer."""


def _windows(report: Report, stage: StagePlan) -> list[Json]:
    due = stage.windows()
    lines = report.steps[stage.stage]
    seen: dict[Group, list[Json]] = {}
    for line in lines:
        for text, one in line["windows"].items():
            window = parse_choice(text)
            assert isinstance(window, Window)
            seen.setdefault((window.kind, window.slot), []).append(one)
    planned: dict[Group, list[Window]] = {}
    for window in due:
        planned.setdefault((window.kind, window.slot), []).append(window)
    times = _openings(report.job, stage)
    rows = []
    for kind, slot in dict.fromkeys([*planned, *seen]):
        windows = planned.get((kind, slot), [])
        rows.append(
            {
                "kind": kind,
                "name": f"{kind} {slot}".strip(),
                "planned": _planned_window(report, stage, windows or [_any(kind, slot, stage)], due, times),
                "measured": _measured_window(seen.get((kind, slot), []), len(lines)),
            }
        )
    return rows


def _any(kind: str, slot: str, stage: StagePlan) -> Window:
    layer = stage.layers[0].layer if slot else -1
    choice = parse_choice(f"{kind}:{layer}:{slot}" if slot else kind)
    assert isinstance(choice, Window)
    return choice


def _openings(job: Job, stage: StagePlan) -> Callable[[Window], int]:
    """How often a window opens in a step by the schedule, with something to serve."""
    order = actions(job.parallel, job.microbatches, stage.stage)
    pp, vpp = job.parallel.pp, job.parallel.vpp
    served = Counter(s.chunk for i in range(len(order)) if (s := serves(order, i)) is not None)
    chunk = {layer: i for i, ids in enumerate(stage.chunks) for layer in ids}

    def waits(action: Action) -> bool:
        return waits_for_gradient(action, stage.stage, pp, vpp)

    def count(window: Window) -> int:
        if window.kind == "stall":
            return sum(map(waits, order))
        return served[chunk[window.layer]] if window.kind == "fwd" else job.microbatches

    return count


def _planned_window(
    report: Report,
    stage: StagePlan,
    windows: Sequence[Window],
    due: dict[Window, tuple[tuple[int, str], ...]],
    openings: Callable[[Window], int],
) -> Json:
    costs, graph = report.job.costs, graph_of(report.job, report.plan)
    rates = costs.layer
    work, room, size = [], [], []
    for window in windows:
        pairs = due.get(window, ())
        stalled = window.kind == "stall"
        work.append(sum(rates.rebuild_ns(region, hidden=not stalled) for _, region in pairs))
        size.append(sum(graph.rebuilt_bytes(region, stage.layer(layer).dropped) for layer, region in pairs))
        if stalled:
            room.append(report.timeline.stall_ns(stage.stage))
        else:
            room.append(costs.head_window_ns if window.kind == "head" else rates.window_ns(window))
    return {
        "opened": sum(map(openings, windows)) if due.keys() & set(windows) else 0,
        "capacity_ns": round(mean(room)),
        "work_ns": round(mean(work)),
        "wait_ns": round(mean(max(0, r - w) for r, w in zip(room, work, strict=True))),
        "bytes": round(mean(size)),
    }


def _measured_window(found: Sequence[Json], steps: int) -> Json:
    """Openings with work count; where there were none, the waits of those without."""

    def total(name: str) -> int:
        return sum(one[name] for one in found)

    opened, empty = total("opened"), total("empty")
    if opened:
        return {
            "opened": opened / steps,
            "work_ns": round(total("work_ns") / opened),
            "wait_ns": round(total("wait_ns") / opened),
            "bytes": round(total("size_bytes") / opened),
        }
    wait = round(total("empty_wait_ns") / empty) if empty else None
    return {"opened": empty / steps, "work_ns": None, "wait_ns": wait, "bytes": None}
