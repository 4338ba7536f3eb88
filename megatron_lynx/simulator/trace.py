"""A timeline as Chrome trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" of the Chromium project: complete events (``X``), counters (``C``),
flow events (``s``, ``f``) and metadata (``M``). A pipeline rank is a process, its streams are
threads. Times in the file are microseconds; ours are nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_lynx.schedule import Action
from megatron_lynx.simulator import memory
from megatron_lynx.simulator import passes as kinds
from megatron_lynx.simulator.timeline import Run, Span, Timeline

Event = dict[str, Any]

_THREADS = ("compute", "tensor-parallel link", "activations to next", "gradients to previous")
"""A rank's threads. The pipeline link works in both directions at once, so it has two."""

_COLORS = {
    kinds.FORWARD: "thread_state_runnable",
    kinds.BACKWARD: "rail_response",
    kinds.HIDDEN: "good",
    kinds.STALL: "rail_idle",
    kinds.EXPOSED: "terrible",
    kinds.WAIT: "grey",
    kinds.COLLECTIVE: "rail_load",
    kinds.P2P: "rail_animation",
}
"""Names from the palette of the trace viewer; Perfetto picks its own."""


def _us(time_ns: int) -> float:
    return time_ns / 1000


MOST_EVENTS = 100_000
"""Spans that a trace shows one by one. A viewer takes more, slowly; a step repeats itself."""


def shown(timeline: Timeline, most: int = MOST_EVENTS) -> frozenset[int]:
    """The microbatches that a trace shows piece by piece, all if there is room for them; else the first,
    those in the middle and the last, as many as there is room for. Passes of the others are one span each."""
    found = {run.action.microbatch for rank in timeline.runs for run in rank}
    count = max(found, default=0) + 1
    spans = sum(len(timeline.inside(run).body) for rank in timeline.runs for run in rank)
    if spans <= most:
        return frozenset(found)
    third = max(1, count * most // spans // 3)
    middle = count // 2
    chosen = {*range(third), *range(middle, middle + third), *range(count - third, count)}
    return frozenset(chosen & found)


def trace_events(
    timeline: Timeline, static_bytes: Sequence[int] | None = None, most: int = MOST_EVENTS
) -> list[Event]:
    """All events; ``static_bytes`` per rank is added to the memory counter. With more than ``most`` spans
    not every microbatch is shown piece by piece (``shown``); of memory in the other passes the most that
    is held in each counts."""
    stages, detailed = range(len(timeline.runs)), shown(timeline, most)
    static = static_bytes or [0] * len(timeline.runs)
    events: list[Event] = []
    for stage in stages:
        events += _metadata(stage)
        for run in timeline.runs[stage]:
            spans = timeline.spans_of(run) if run.action.microbatch in detailed else _whole(run)
            events += [_complete(span) for span in spans if span.kind != kinds.IDLE]
        events += _counters(timeline, stage, static[stage], detailed)
    events += _flows(timeline, detailed)
    return events


def _whole(run: Run) -> Iterator[Span]:
    """A pass as one span, with its transfer."""
    kind = kinds.FORWARD if run.action.forward else kinds.BACKWARD
    if run.begin_ns < run.end_ns:
        yield Span(run.stage, kinds.COMPUTE, kind, run.begin_ns, run.end_ns, -1, "", run.action)
    if run.sent_ns < run.delivered_ns:
        yield Span(
            run.stage, kinds.PIPELINE_LINK, kinds.P2P, run.sent_ns, run.delivered_ns, -1, "", run.action
        )


def to_json(timeline: Timeline, static_bytes: Sequence[int] | None = None) -> str:
    """The trace file's text."""
    whole = {"traceEvents": trace_events(timeline, static_bytes), "displayTimeUnit": "ns"}
    return json.dumps(whole, separators=(",", ":")) + "\n"


def _metadata(stage: int) -> list[Event]:
    def name(kind: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": kind, "pid": stage, "tid": tid, "args": args}

    events = [
        name("process_name", 0, name=f"stage {stage}"),
        name("process_sort_index", 0, sort_index=stage),
    ]
    for tid, thread in enumerate(_THREADS):
        events.append(name("thread_name", tid, name=thread))
        events.append(name("thread_sort_index", tid, sort_index=tid))
    return events


def _thread(stream: str, action: Action | None) -> int:
    if stream == kinds.PIPELINE_LINK:
        return 2 if action is None or action.forward else 3
    return kinds.STREAMS.index(stream)


def _complete(span: Span) -> Event:
    event: Event = {
        "ph": "X",
        "name": span.label or span.kind,
        "cat": span.kind,
        "pid": span.stage,
        "tid": _thread(span.stream, span.action),
        "ts": _us(span.start_ns),
        "dur": _us(span.duration_ns),
        "args": {"kind": span.kind},
    }
    if span.kind in _COLORS:
        event["cname"] = _COLORS[span.kind]
    if span.action is not None:
        event["args"]["action"] = str(span.action)
    if span.layer >= 0:
        event["args"]["layer"] = span.layer
    return event


def _counters(timeline: Timeline, stage: int, static_bytes: int, detailed: frozenset[int]) -> Iterator[Event]:
    for at_ns, held in memory.curve(timeline, stage, static_bytes, detailed):
        yield {
            "ph": "C",
            "name": "memory",
            "pid": stage,
            "tid": 0,
            "ts": _us(at_ns),
            "args": {"bytes": held},
        }


def _flows(timeline: Timeline, detailed: frozenset[int]) -> Iterator[Event]:
    """An arrow from each transfer to the action that waits for it, for these microbatches."""
    waiting = {
        (run.action.forward, run.arrival_ns, run.action.microbatch): run
        for rank in timeline.runs
        for run in rank
        if run.arrival_ns
    }
    number = 0
    for rank in timeline.runs:
        for run in rank:
            key = (run.action.forward, run.delivered_ns, run.action.microbatch)
            if run.action.microbatch not in detailed:
                continue
            if run.sent_ns == run.delivered_ns or key not in waiting:
                continue
            number += 1
            target = waiting[key]
            base = {"name": "transfer", "cat": kinds.P2P, "id": number}
            yield {
                **base,
                "ph": "s",
                "pid": run.stage,
                "tid": _thread(kinds.PIPELINE_LINK, run.action),
                "ts": _us(run.sent_ns),
            }
            yield {
                **base,
                "ph": "f",
                "bp": "e",
                "pid": target.stage,
                "tid": _thread(kinds.COMPUTE, target.action),
                "ts": _us(target.begin_ns),
            }
