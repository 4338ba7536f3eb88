"""Splits of layers over ranks by dynamic programming over a table of periods.

``periods[rank][n]`` is the time that one microbatch takes on ``rank`` when it holds ``n`` layers;
an ``n`` that is missing does not fit. Both objectives are approximations of a simulated step and
only make good places to start from: a period also depends on what waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Periods = Sequence[Mapping[int, int]]


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
    chunk ends with the head. With ``unequal`` all others follow.
    """
    base, rest = divmod(layers, chunks)
    if base < 1:
        return
    equal = (base + 1,) * rest + (base,) * (chunks - rest)
    equal = equal if last else equal[::-1]
    yield equal
    if unequal:
        yield from (share for share in _shares(layers, chunks) if share != equal)


def _shares(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    if chunks == 1:
        yield (layers,)
        return
    for first in range(1, layers - chunks + 2):
        for others in _shares(layers - first, chunks - 1):
            yield (first, *others)
