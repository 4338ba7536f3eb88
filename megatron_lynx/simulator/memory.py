"""Bytes over time on each rank, from the runs of a timeline: the curve, its peak and its owners.

Computed after the events, never inside their loop. What the activations of a rank hold starts and
ends at zero; weights and the like are added as ``static_bytes``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_lynx.schedule import Action
from megatron_lynx.simulator.passes import Delta
from megatron_lynx.simulator.timeline import Run, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment when a rank holds most.

    ``owners`` splits ``size_bytes`` (without static memory) by whose it is; ``action``, ``layer``
    and ``region`` say what runs at that moment.
    """

    stage: int
    size_bytes: int
    at_ns: int
    action: Action | None
    layer: int
    region: str
    owners: tuple[tuple[str, int], ...]

    @property
    def owner(self) -> str:
        """Who holds most at the peak."""
        return max(self.owners, key=lambda owned: owned[1])[0] if self.owners else "nobody"

    def __str__(self) -> str:
        shares = ", ".join(f"{size} {owner}" for owner, size in self.owners)
        where = f"layer {self.layer} {self.region}".strip() if self.layer >= 0 else self.region
        return f"stage {self.stage}: {self.size_bytes} bytes in {self.action} {where}: {shares}"


def _changes(timeline: Timeline, stage: int) -> Iterator[tuple[int, Run, Delta]]:
    """(time, run, change) of one rank in the order in which they happen."""
    for run in timeline.runs[stage]:
        inside = timeline.inside(run)
        for delta in inside.early_deltas:
            yield run.start_ns + delta.at_ns, run, delta
        for delta in inside.body_deltas:
            yield run.begin_ns + delta.at_ns, run, delta


def curve(
    timeline: Timeline, stage: int, static_bytes: int = 0, detailed: Collection[int] | None = None
) -> tuple[tuple[int, int], ...]:
    """(time, bytes held from then on): one point for each moment at which something changes.

    Within one moment the largest value counts: what is taken and freed at once was there. A pass of a
    microbatch that is not among ``detailed``, if given, is one moment, and what it leaves another.
    """
    held, points = static_bytes, [(0, static_bytes)]
    for at_ns, run, delta in _changes(timeline, stage):
        if detailed is not None and run.action.microbatch not in detailed:
            at_ns = run.begin_ns
        before, held = held, held + delta.size_bytes
        if at_ns > points[-1][0]:
            if points[-1][1] != before:
                points.append((points[-1][0], before))
            points.append((at_ns, held))
        elif held > points[-1][1]:
            points[-1] = (at_ns, held)
    if points[-1][1] != held:
        points.append((points[-1][0], held))
    return tuple(points)


def peak(timeline: Timeline, stage: int) -> Peak:
    """The largest amount that the activations of a rank hold, and whose it is."""
    held = best = 0
    owned: dict[str, int] = {}
    found = Peak(stage=stage, size_bytes=0, at_ns=0, action=None, layer=-1, region="", owners=())
    for at_ns, run, delta in _changes(timeline, stage):
        held += delta.size_bytes
        owned[delta.owner] = owned.get(delta.owner, 0) + delta.size_bytes
        if held > best:
            best = held
            found = Peak(
                stage=stage,
                size_bytes=held,
                at_ns=at_ns,
                action=run.action,
                layer=delta.layer,
                region=delta.name,
                owners=tuple((name, size) for name, size in owned.items() if size),
            )
    return found


def left_over(timeline: Timeline, stage: int) -> dict[str, int]:
    """What is still held at the end, by owner: nothing, unless there is an error in the walk."""
    owned: dict[str, int] = {}
    for _, _, delta in _changes(timeline, stage):
        owned[delta.owner] = owned.get(delta.owner, 0) + delta.size_bytes
    return {owner: size for owner, size in owned.items() if size}
