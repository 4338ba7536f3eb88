"""A lower bound of a step's time, from the work of each rank and the ways to it and from it.

Rank r cannot begin before the first microbatch's forward has come through the ranks before it, and after
its last backward that has to go back through them; in between it has all its work to do:

    sum over j < r of (F_j + B_j + 2 p2p) + work_r

Without model chunks its first backward cannot begin before the first microbatch has been to the end
and back, and by then at most ``p - r`` of its forwards are done:

    sum over all j of F_j + sum over j > r of B_j + (work_r less those forwards) + sum over j < r of B_j
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lynx.simulator.program import counts
from megatron_lynx.spec import Parallel


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What the bound needs to know of a rank: all its work in a step, the shortest forward and backward
    of chunk 0, and what at most is done or begun before the first backward's body (one chunk)."""

    work_ns: int
    forward_ns: int
    backward_ns: int
    before_ns: int


def rank_times(
    early_ns: Sequence[int], body_ns: Sequence[int], parallel: Parallel, microbatches: int, rank: int
) -> RankTimes:
    """The times of one rank, from its table (``SimStage``)."""
    often, chunks = counts(parallel, microbatches)[rank], parallel.vpp
    half, width = chunks * (chunks + 1), chunks + 1
    forward = [body_ns[key] for key in often if key < width]
    backward = [body_ns[key] for key in often if half <= key < half + width]
    return RankTimes(
        work_ns=sum(n * (early_ns[key] + body_ns[key]) for key, n in often.items()),
        forward_ns=min(forward),
        backward_ns=min(backward),
        before_ns=min(microbatches, parallel.pp - rank) * max(forward) + max(early_ns, default=0),
    )


def floor_ns(ranks: Sequence[RankTimes], parallel: Parallel, p2p_ns: int = 0) -> int:
    """A time that no step with these ranks' times can beat."""
    through = sum(rank.forward_ns for rank in ranks)
    after = sum(rank.backward_ns for rank in ranks)
    way = least = 0
    for number, rank in enumerate(ranks):
        least = max(least, way + rank.work_ns)
        after -= rank.backward_ns
        if parallel.vpp == 1:
            before = sum(other.backward_ns for other in ranks[:number])
            hops = p2p_ns * (2 * len(ranks) - 2)
            least = max(least, through + after + hops + rank.work_ns - rank.before_ns + before)
        way += rank.forward_ns + rank.backward_ns + 2 * p2p_ns
    return least
