"""Timeline: what each rank's streams do over time.

A ``Run`` is one action; ``Timeline.spans`` breaks runs down into spans of one kind each. The spans
of a rank's compute stream follow each other without a gap from 0 to the makespan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lynx.schedule import Action
from megatron_lynx.simulator import passes as kinds
from megatron_lynx.simulator.passes import Pass, Piece
from megatron_lynx.simulator.walk import StageWalk


class Run(NamedTuple):
    """One action on its rank.

    It starts when the rank is free, is ``ready`` when its early work is done, begins its body when
    what it requires has arrived too (``arrival_ns``; 0 if it requires nothing from elsewhere), and
    ends. Its result is sent from ``sent_ns`` to ``delivered_ns``. ``partner`` is the chunk that a
    forward serves, or that of the forward that served a backward.
    """

    stage: int
    action: Action
    partner: int | None
    start_ns: int
    ready_ns: int
    arrival_ns: int
    begin_ns: int
    end_ns: int
    sent_ns: int
    delivered_ns: int


class Span(NamedTuple):
    """A stretch of one stream of one rank. ``layer`` is -1 and ``action`` None where none applies."""

    stage: int
    stream: str
    kind: str
    start_ns: int
    end_ns: int
    layer: int
    name: str
    action: Action | None

    @property
    def duration_ns(self) -> int:
        """Length of the span."""
        return self.end_ns - self.start_ns

    @property
    def label(self) -> str:
        """What people read on the span: ``F2.0 layer 3 linear_proj``."""
        layer = f"layer {self.layer}" if self.layer >= 0 else ""
        return " ".join(word for word in (str(self.action or ""), layer, self.name) if word)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The runs of every rank, in order; with ``walks`` also what is inside each of them."""

    runs: tuple[tuple[Run, ...], ...]
    walks: tuple[StageWalk, ...] | None = None

    @property
    def makespan_ns(self) -> int:
        """From the first forward to the last backward."""
        return max((rank[-1].end_ns for rank in self.runs if rank), default=0)

    def inside(self, run: Run) -> Pass:
        """The pass of a run; without walks one piece for its body and one for its early work."""
        action = run.action
        if self.walks is not None:
            walk = self.walks[run.stage]
            find = walk.forward if action.forward else walk.backward
            return find(action.chunk, run.partner)
        early, body = run.ready_ns - run.start_ns, run.end_ns - run.begin_ns
        kind = kinds.FORWARD if action.forward else kinds.BACKWARD
        stall = (Piece(kinds.COMPUTE, kinds.STALL, 0, early, -1, ""),) if early else ()
        work = (Piece(kinds.COMPUTE, kind, 0, body, -1, ""),) if body else ()
        return Pass(early=stall, body=work, early_ns=early, body_ns=body)

    def spans(self, stage: int | None = None) -> Iterator[Span]:
        """Spans of one rank, or of all; on each stream in the order of time."""
        for rank in self.runs if stage is None else (self.runs[stage],):
            for run in rank:
                yield from self.spans_of(run)
            if rank and rank[-1].end_ns < self.makespan_ns:
                end = rank[-1].end_ns
                yield Span(rank[-1].stage, kinds.COMPUTE, kinds.IDLE, end, self.makespan_ns, -1, "", None)

    def spans_of(self, run: Run) -> Iterator[Span]:
        """The spans of one run, on each stream in the order of time."""
        stage, action, inside = run.stage, run.action, self.inside(run)
        for piece in inside.early:
            start, end = run.start_ns + piece.start_ns, run.start_ns + piece.end_ns
            cut = min(max(run.arrival_ns, start), end)
            if start < cut:
                yield Span(stage, piece.stream, kinds.STALL, start, cut, piece.layer, piece.name, action)
            if cut < end:
                yield Span(stage, piece.stream, kinds.EXPOSED, cut, end, piece.layer, piece.name, action)
        if run.ready_ns < run.begin_ns:
            yield Span(stage, kinds.COMPUTE, kinds.IDLE, run.ready_ns, run.begin_ns, -1, "", action)
        base = run.begin_ns
        for stream, kind, start, end, layer, name in inside.body:
            yield Span(stage, stream, kind, base + start, base + end, layer, name, action)
        if run.sent_ns < run.delivered_ns:
            yield Span(stage, kinds.PIPELINE_LINK, kinds.P2P, run.sent_ns, run.delivered_ns, -1, "", action)

    def totals_ns(self, stage: int) -> dict[str, int]:
        """Time of one rank by kind of span. Those of the compute stream add up to the makespan."""
        times: Counter[str] = Counter(dict.fromkeys(kinds.KINDS, 0))
        inside: dict[tuple[bool, int, int | None], Counter[str]] = {}
        for run in self.runs[stage]:
            key = (run.action.forward, run.action.chunk, run.partner)
            if key not in inside or self.walks is None:
                inside[key] = Counter()
                for piece in self.inside(run).body:
                    inside[key][piece.kind] += piece.end_ns - piece.start_ns
            times.update(inside[key])
            early = run.ready_ns - run.start_ns
            hidden = min(early, max(0, run.arrival_ns - run.start_ns))
            times[kinds.STALL] += hidden
            times[kinds.EXPOSED] += early - hidden
            times[kinds.IDLE] += run.begin_ns - run.ready_ns
            times[kinds.P2P] += run.delivered_ns - run.sent_ns
        if self.runs[stage]:
            times[kinds.IDLE] += self.makespan_ns - self.runs[stage][-1].end_ns
        return dict(times)

    def stall_ns(self, stage: int) -> int:
        """How long a rank typically waits for a gradient before a backward that comes right after
        a forward: the median, recomputation in the wait included, 0 if there is no such backward.
        This is the capacity of a plan's ``stall`` window.
        """
        waits = []
        for before, run in zip(self.runs[stage], self.runs[stage][1:], strict=False):
            if before.action.forward and not run.action.forward:
                waits.append(max(0, run.arrival_ns - run.start_ns))
        return sorted(waits)[(len(waits) - 1) // 2] if waits else 0

    def bubble(self) -> float:
        """Share of all ranks' time in which the compute stream idles for the pipeline."""
        idle = sum(self.totals_ns(stage)[kinds.IDLE] for stage in range(len(self.runs)))
        whole = self.makespan_ns * len(self.runs)
        return idle / whole if whole else 0.0

    def __str__(self) -> str:
        """One line a rank, one word a run: ``F0.0[0,30]``; early work as ``B0.0[60+10,100]``."""
        lines = []
        for stage, rank in enumerate(self.runs):
            words = []
            for run in rank:
                early = run.ready_ns - run.start_ns
                start = f"{run.start_ns}+{early}~{run.begin_ns}" if early else f"{run.begin_ns}"
                words.append(f"{run.action}[{start},{run.end_ns}]")
            lines.append(f"stage {stage}: " + " ".join(words))
        return "\n".join([*lines, f"makespan {self.makespan_ns}"]) + "\n"
