"""Splits of layers over ranks by dynamic programming over a table of periods.

``periods[rank][n]`` is the time that one microbatch takes on ``rank`` when it holds ``n`` layers;
an ``n`` that is missing does not fit. Both objectives are approximations of a simulated step and
only make good places to start from: a period also depends on what waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations

Periods = Sequence[Mapping[int, int]]

MOST_SHARES = 256
"""Ways to share a rank's layers among its chunks that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Periods by rank and number of layers, and how the chunks of a rank share that number."""

    periods: tuple[dict[int, int], ...]
    shares: tuple[dict[int, tuple[int, ...]], ...]


def bottleneck(periods: Periods, total: int) -> tuple[int, ...] | None:
    """Layers per rank, ``total`` in all, with the smallest longest period; None if nothing fits."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for times in periods:
        step: dict[int, tuple[int, tuple[int, ...]]] = {}
        for used, (longest, ranks) in best.items():
            for layers, period in times.items():
                if used + layers > total:
                    continue
                value = max(longest, period)
                if used + layers not in step or value < step[used + layers][0]:
                    step[used + layers] = (value, (*ranks, layers))
        best = step
    return best[total][1] if total in best else None


def least_sum(periods: Periods, total: int, limit: int) -> tuple[int, tuple[int, ...]] | None:
    """The smallest sum of periods, none of them above ``limit``, and its layers per rank."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for times in periods:
        step: dict[int, tuple[int, tuple[int, ...]]] = {}
        allowed = [(layers, period) for layers, period in times.items() if period <= limit]
        for used, (spent, ranks) in best.items():
            for layers, period in allowed:
                if used + layers > total:
                    continue
                value = spent + period
                if used + layers not in step or value < step[used + layers][0]:
                    step[used + layers] = (value, (*ranks, layers))
        best = step
    return best.get(total)


def summed(periods: Periods, total: int, microbatches: int) -> tuple[int, ...] | None:
    """Layers per rank with the smallest (microbatches - 1) * longest + sum of periods.

    Exact: for each candidate for the longest period, from the smallest up, the smallest sum; it
    ends when the first term alone, with the smallest sum of all, is no better than what is known.
    """
    limits = sorted({period for times in periods for period in times.values()})
    if not limits:
        return None
    whole = least_sum(periods, total, limits[-1])
    if whole is None:
        return None
    best: tuple[int, tuple[int, ...]] | None = None
    for limit in limits:
        if best is not None and (microbatches - 1) * limit + whole[0] >= best[0]:
            break
        found = least_sum(periods, total, limit)
        if found is None:
            continue
        longest = max(times[layers] for times, layers in zip(periods, found[1], strict=True))
        value = (microbatches - 1) * longest + found[0]
        if best is None or value < best[0]:
            best = (value, found[1])
    return best[1] if best else None


def spread(layers: int, chunks: int, *, last: bool, unequal: bool) -> Iterator[tuple[int, ...]]:
    """Ways in which a rank's chunks can share its layers, each with one at least.

    First as equal as can be, the larger chunks last, or first on the ``last`` rank, whose last
    chunk ends with the head. With ``unequal`` others follow, those nearest to it first, ``MOST_SHARES``
    in all.
    """
    base, rest = divmod(layers, chunks)
    if base < 1:
        return
    equal = (base + 1,) * rest + (base,) * (chunks - rest)
    equal = equal if last else equal[::-1]
    yield from islice(_nearest(equal), MOST_SHARES if unequal else 1)


def _nearest(share: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """``share``, then what one layer more moved between two chunks makes of it, and so on."""
    seen, waiting = {share}, deque([share])
    while waiting:
        one = waiting.popleft()
        yield one
        for source, target in permutations(range(len(one)), 2):
            if one[source] > 1:
                moved = list(one)
                moved[source] -= 1
                moved[target] += 1
                if (other := tuple(moved)) not in seen:
                    seen.add(other)
                    waiting.append(other)
