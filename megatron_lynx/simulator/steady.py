"""Step: how long a step takes, without running the rounds that are as those before.

The times of a step are sums and maxima of earlier ones. Where, from one group of rounds to the next, every
time grew by the same amount twice in a row and every maximum kept its winner, all times go on growing
like that until some maximum changes its winner. When that will be is known, for the loser gains on the
winner by the same amount each time; so that many groups are skipped at once. Nothing is approximated:
where no such group is found, every round is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_lynx.simulator.program import Op, Program


@dataclass(slots=True)
class _Notes:
    """What a run of ops leaves behind. ``leads``: how far the first argument of each maximum is ahead of
    the second (below 0: behind). ``waits``: (rank, time) from a rank's being free to the arrival of
    a gradient, before backwards that come right after a forward."""

    ends: list[int] = field(default_factory=list)
    leads: list[int] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    """After a round: all arrivals and ends, and when ranks and links are free."""
    total: int = 0
    """Their sum."""


class Step:
    """One step on given times (tables of all ranks laid end to end, see ``SimStage``).

    ``makespan_ns`` is from the first forward to the last backward. ``skipped`` counts rounds that were
    not run.
    """

    def __init__(self, prog: Program, early_ns: Sequence[int], body_ns: Sequence[int], p2p_ns: int) -> None:
        self.prog, self.p2p_ns = prog, p2p_ns
        self._early, self._body = early_ns, body_ns
        self._free, self._wire = [0] * prog.ranks, [0] * (2 * prog.ranks)
        self._waits = [Counter[int]() for _ in range(prog.ranks)]
        self._forward = [False] * prog.ranks
        self.skipped = 0
        arrivals: list[int] = []
        self._count(self._run(prog.head, arrivals).waits)
        if prog.body:
            arrivals = self._rounds(arrivals[-len(prog.body) :])
        self._count(self._run(prog.tail, arrivals).waits)
        self.makespan_ns = max(self._free)

    def stall_ns(self, stage: int) -> int:
        """How long a rank typically waits for a gradient before a backward that comes right after
        a forward: the median, as ``Timeline.stall_ns``."""
        waits, seen = self._waits[stage], 0
        middle = (waits.total() - 1) // 2
        for wait in sorted(waits):
            seen += waits[wait]
            if seen > middle:
                return wait
        return 0

    def _count(self, waits: Sequence[tuple[int, int]]) -> None:
        for rank, wait in waits:
            self._waits[rank][max(0, wait)] += 1

    def _run(self, ops: Sequence[Op], arrivals: list[int]) -> _Notes:
        """The event loop. ``arrivals`` are those of the ops before, and get those of ``ops``."""
        early, body, p2p_ns = self._early, self._body, self.p2p_ns
        free, wire, forward = self._free, self._wire, self._forward
        half = self.prog.width // 2
        notes = _Notes()
        ends, leads, waits = notes.ends, notes.leads, notes.waits
        for rank, key, back, link in ops:
            start = free[rank]
            now = start + early[key]
            arrival = arrivals[-back] if back else 0
            if key // half % 2 == 0:
                forward[rank] = True
            elif forward[rank]:
                forward[rank] = False
                waits.append((rank, arrival - start if back else 0))
            if back:
                leads += (arrival - now, arrival - start)
                if arrival > now:
                    now = arrival
            now += body[key]
            free[rank] = now
            ends.append(now)
            if link >= 0 and p2p_ns:
                sent = wire[link]
                leads.append(sent - now)
                now = (sent if sent > now else now) + p2p_ns
                wire[link] = now
            arrivals.append(now)
        return notes

    def _rounds(self, arrivals: list[int]) -> list[int]:
        """All rounds; ``arrivals`` are those of the round before. Returns those of the last one."""
        body, left = self.prog.body, self.prog.rounds
        seen: list[_Notes] = []
        while left:
            notes = self._run(body, arrivals)
            arrivals = arrivals[-len(body) :]
            notes.times = [*arrivals, *notes.ends, *self._free, *self._wire]
            notes.total = sum(notes.times)
            self._count(notes.waits)
            left -= 1
            seen = [*seen, notes][-3 * self.prog.ranks :]
            size, groups = _repeats(seen, left)
            if groups:
                left -= size * groups
                self._skip(seen, size, groups)
                arrivals = [a + groups * (a - b) for a, b in self._pair(seen, size, len(body))]
                seen = []
        return arrivals

    def _pair(self, seen: Sequence[_Notes], size: int, count: int) -> list[tuple[int, int]]:
        """The first ``count`` times after the last round, and after the round ``size`` before it."""
        return list(zip(seen[-1].times[:count], seen[-1 - size].times[:count], strict=True))

    def _skip(self, seen: Sequence[_Notes], size: int, groups: int) -> None:
        """Go on by so many groups of ``size`` rounds."""
        self.skipped += size * groups
        later = [a + groups * (a - b) for a, b in self._pair(seen, size, len(seen[-1].times))]
        ranks = self.prog.ranks
        self._free[:], self._wire[:] = later[-3 * ranks : -2 * ranks], later[-2 * ranks :]
        for now, before in zip(seen[-size:], seen[-2 * size : -size], strict=True):
            for (rank, wait), (_, earlier) in zip(now.waits, before.waits, strict=True):
                if wait == earlier:
                    self._waits[rank][max(0, wait)] += groups
                    continue
                for number in range(1, groups + 1):
                    self._waits[rank][max(0, wait + number * (wait - earlier))] += 1


def _repeats(seen: Sequence[_Notes], left: int) -> tuple[int, int]:
    """(rounds of a group, groups) that will be as the last ones, of ``left`` rounds; (0, 0) if unknown."""
    for size in range(1, len(seen) // 3 + 1):
        if left < size or not _linear(seen, size):
            continue
        groups = left // size
        for now, before in zip(seen[-size:], seen[-2 * size : -size], strict=True):
            groups = min(groups, _unchanged(now.leads, before.leads, groups))
        if groups:
            return size, groups
    return 0, 0


def _linear(seen: Sequence[_Notes], size: int) -> bool:
    """Whether all times of the last three groups of ``size`` rounds grew alike."""
    groups = [(seen[-1 - i], seen[-1 - i - size], seen[-1 - i - 2 * size]) for i in range(size)]
    if any(now.total - before.total != before.total - first.total for now, before, first in groups):
        return False
    return all(
        a - b == b - c
        for now, before, first in groups
        for a, b, c in zip(now.times, before.times, first.times, strict=True)
    )


def _unchanged(now: Sequence[int], before: Sequence[int], most: int) -> int:
    """How many times more (up to ``most``) all leads can change as they did, none past 0."""
    for lead, earlier in zip(now, before, strict=True):
        gain = lead - earlier
        if gain == 0 or (gain > 0 and earlier >= 0) or (gain < 0 and earlier <= 0):
            continue
        if (lead > 0) == (gain > 0) and lead != 0:
            return 0
        most = min(most, abs(lead) // abs(gain))
    return most
