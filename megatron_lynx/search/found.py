"""What a search over configurations found: entries, what was left out and why, and the JSON of it all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_lynx.plan import Plan, Window
from megatron_lynx.search.rows import Row
from megatron_lynx.search.space import Config, Question

SCHEMA = 1

WITHOUT, WITH = "megatron", "lynx"
"""Whose entry: Megatron's own recomputation alone (offloading is left out), or lynx's planners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One configuration with the best plan of one side (``WITHOUT`` or ``WITH``) so far.

    ``floor_ns`` is a time that no plan of the configuration can beat. ``exact`` says that the plan is
    of the last kind there is for its side: ``opt``, or each of Megatron's options, with the layers moved.
    ``costs`` says where the times come from.
    """

    config: Config
    side: str
    row: Row
    plan: Plan
    floor_ns: int
    exact: bool = False
    costs: str = ""

    @property
    def iteration_ns(self) -> int:
        """Time of a step with the optimizer."""
        assert self.row.iteration_ns is not None
        return self.row.iteration_ns

    @property
    def fullest(self) -> tuple[int, int]:
        """The stage that holds most, and how many bytes."""
        top = max(self.row.stages, key=lambda stage: stage.peak_bytes)
        return top.stage, top.peak_bytes

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed, so that the entry needs no option at all."""
        return all(not layer.choices for stage in self.plan.stages for layer in stage.layers)

    @property
    def recomputed(self) -> str:
        """What is run again, where, and in how many layers; longest lists last."""
        counts: dict[str, Counter[str]] = {}
        for stage in self.plan.stages:
            for layer in stage.layers:
                for region, choice in layer.choices:
                    place = "in windows" if isinstance(choice, Window) else "on demand"
                    place = "in stalls" if isinstance(choice, Window) and choice.kind == "stall" else place
                    counts.setdefault(place, Counter())[region] += 1
        parts = [
            f"{place}: " + ", ".join(f"{region} x{n}" for region, n in found.items())
            for place, found in sorted(counts.items())
        ]
        return "; ".join(parts) or "nothing"


@dataclass(slots=True, kw_only=True)
class Tally:
    """How many configurations there were and what became of them.

    ``no_room`` cannot hold their weights, ``bounded`` cannot beat what was found, ``planned`` were
    planned, of which ``misfits`` fit with no plan; ``exact`` were planned with the best planner and the
    layers moved. ``unproven`` might still be faster, but were not planned exactly: time ran out, or
    ``--quick``.
    """

    configurations: int = 0
    no_room: int = 0
    bounded: int = 0
    planned: int = 0
    misfits: int = 0
    exact: int = 0
    unproven: int = 0

    def __str__(self) -> str:
        return (
            f"{self.configurations} configurations: {self.no_room} have no room for their weights, "
            f"{self.bounded} cannot be faster than what was found, {self.planned} planned "
            f"({self.misfits} of them fit with no plan), {self.exact} exactly"
            + (f"; {self.unproven} might still be faster" if self.unproven else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """An entry's step when a figure of the cluster is off, with the plan as it is."""

    name: str
    iteration_ns: int


@dataclass(slots=True, kw_only=True)
class Tuned:
    """All that was found. Lists are sorted, fastest first; ``shifts`` are those of ``WITH``'s entries."""

    question: Question
    found: dict[str, list[Found]] = field(default_factory=lambda: {WITHOUT: [], WITH: []})
    tallies: dict[str, Tally] = field(default_factory=lambda: {WITHOUT: Tally(), WITH: Tally()})
    shifts: dict[Config, tuple[Shift, ...]] = field(default_factory=dict)
    stopped: str | None = None

    def best(self, side: str) -> Found | None:
        """The fastest entry of a side."""
        return self.found[side][0] if self.found[side] else None

    @property
    def winner(self) -> Found | None:
        """The fastest entry of all; lynx's where both are as fast."""
        both = [one for side in (WITH, WITHOUT) if (one := self.best(side)) is not None]
        return min(both, key=lambda one: one.iteration_ns, default=None)

    @property
    def gain(self) -> float | None:
        """How many times faster the best with lynx is than the best without, both tuned."""
        one, other = self.best(WITH), self.best(WITHOUT)
        return other.iteration_ns / one.iteration_ns if one and other else None

    def add(self, entry: Found) -> None:
        """Put an entry in, unless its side has a faster one of the same configuration."""
        entries = self.found[entry.side]
        old = next((one for one in entries if one.config == entry.config), None)
        if old is not None:
            exact = old.exact or entry.exact
            better = entry if entry.iteration_ns < old.iteration_ns else old
            entries.remove(old)
            entry = replace(better, exact=exact)
        entries.append(entry)
        entries.sort(key=lambda one: (one.iteration_ns, one.config))

    def rank_ns(self, side: str, place: int) -> int:
        """The time of the entry at a place from 1; more than any if there are fewer."""
        entries = self.found[side]
        return entries[place - 1].iteration_ns if len(entries) >= place else 1 << 62


def tokens_per_device(question: Question, iteration_ns: int) -> float:
    """Tokens per second and device."""
    return question.global_batch_size * question.seq_length * 1e9 / iteration_ns / question.devices


def entry_json(question: Question, entry: Found, shifts: Sequence[Shift] = ()) -> dict[str, Any]:
    """An entry as JSON values."""
    stage, peak = entry.fullest
    return {
        "config": asdict(entry.config),
        "name": str(entry.config),
        "side": entry.side,
        "exact": entry.exact,
        "floor_ns": entry.floor_ns,
        "tokens_per_second_per_device": tokens_per_device(question, entry.iteration_ns),
        "mfu": entry.row.mfu,
        "peak_bytes": peak,
        "peak_stage": stage,
        "recomputed": entry.recomputed,
        "costs": entry.costs,
        "shifts": {shift.name: shift.iteration_ns for shift in shifts},
        "row": asdict(entry.row),
    }


def tuned_json(tuned: Tuned, top: int | None = None) -> str:
    """The object that ``lynx tune --json`` prints: the first ``top`` entries of each side."""
    question = tuned.question
    whole = {
        "schema": SCHEMA,
        "model": asdict(question.model),
        "cluster": question.cluster.name,
        "devices": question.devices,
        "seq_length": question.seq_length,
        "global_batch_size": question.global_batch_size,
        "memory_bytes": question.memory_bytes or question.cluster.budget_bytes,
        "fixed": dict(question.fixed),
        "gain": tuned.gain,
        "stopped": tuned.stopped,
        "tallies": {side: asdict(tally) for side, tally in tuned.tallies.items()},
        "entries": {
            side: [entry_json(question, one, tuned.shifts.get(one.config, ())) for one in entries[:top]]
            for side, entries in tuned.found.items()
        },
    }
    return json.dumps(whole, indent=1) + "\n"
