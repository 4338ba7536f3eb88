"""The trace file against the rules of the Trace Event Format."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from hypothesis import given, settings

from megatron_lynx.simulator import memory
from megatron_lynx.simulator.engine import SimJob, simulate
from megatron_lynx.simulator.trace import shown, to_json, trace_events
from megatron_lynx.spec import Parallel
from tests.pure.simulator.jobs import job_of, table_of, wild_jobs

NEEDED = {
    "X": {"name": str, "cat": str, "ts": float, "dur": float, "pid": int, "tid": int},
    "C": {"name": str, "ts": float, "pid": int, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int, "bp": str},
}
"""Fields that each phase must have, and their types."""

METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def check(trace: dict[str, Any]) -> None:
    """The rules of the format that a viewer depends on."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        fields = NEEDED[event["ph"]]
        for name, kind in fields.items():
            assert isinstance(event[name], kind), (name, event)
        if event["ph"] == "X":
            assert event["dur"] > 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        elif event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
        else:
            flows[event["id"]].append(event)
    assert set(threads) <= named, "every thread with events has a name"
    for events in threads.values():
        ends = 0.0
        for start, duration in sorted(events):
            assert start >= ends - 1e-6, "complete events of a thread are side by side"
            ends = start + duration
    for start, finish in flows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"]


@settings(max_examples=80)
@given(wild_jobs())
def test_any_trace_follows_the_format(job: SimJob) -> None:
    trace = json.loads(to_json(simulate(job)))
    check(trace)
    assert trace["traceEvents"]


@settings(max_examples=30)
@given(wild_jobs())
def test_a_trace_of_few_spans_follows_the_format_and_keeps_the_peak(job: SimJob) -> None:
    timeline = simulate(job)
    events = trace_events(timeline, most=40)
    check({"traceEvents": events, "displayTimeUnit": "ns"})
    assert len(events) <= len(trace_events(timeline))
    for stage, rank in enumerate(timeline.runs):
        held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == stage]
        assert max(held) == memory.peak(timeline, stage).size_bytes
        assert held[-1] == 0
        passes = {e["args"]["action"] for e in events if e["ph"] == "X" and e["pid"] == stage}
        assert {str(run.action) for run in rank if run.begin_ns < run.end_ns} <= passes


def test_a_long_step_is_traced_at_its_ends_and_in_its_middle() -> None:
    timeline = simulate(job_of(Parallel(tp=2, pp=2), 40, {}))
    spans = sum(len(timeline.inside(run).body) for rank in timeline.runs for run in rank)
    assert shown(timeline) == frozenset(range(40))
    assert shown(timeline, spans // 5) == {0, 1, 20, 21, 38, 39}
    assert len(trace_events(timeline, most=spans // 5)) < len(trace_events(timeline)) / 2


def test_what_a_trace_tells() -> None:
    parallel = Parallel(tp=2, pp=2)
    choices = {"input_layernorm": "fwd:K:linear_proj", "core_attention": "demand"}
    job = job_of(parallel, 4, choices, table=table_of(parallel, p2p=30))
    timeline = simulate(job)
    events = trace_events(timeline, [1000, 2000])
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert names == {
        (stage, name)
        for stage in (0, 1)
        for name in ("compute", "tensor-parallel link", "activations to next", "gradients to previous")
    }
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert max(held) == memory.peak(timeline, 1).size_bytes + 2000
    assert held[0] >= 2000
    assert held[-1] == 2000
    kinds = {e["cat"] for e in events if e["ph"] == "X"}
    assert {"forward", "backward", "recompute-hidden", "recompute-exposed", "collective", "p2p"} <= kinds
    assert sum(1 for e in events if e["ph"] == "s") == 2 * 4, "one arrow for each transfer"
    labels = {e["name"] for e in events if e["ph"] == "X"}
    assert "F1.0 layer 0 input_layernorm" in labels
    total = sum(e["dur"] for e in events if e.get("cat") == "recompute-hidden" and e["pid"] == 0)
    assert round(total * 1000) == timeline.totals_ns(0)["recompute-hidden"]
