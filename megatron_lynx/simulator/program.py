"""Program: the actions of all ranks of a step in one order, with its steady state written once.

Everything happens in an order that is fixed by the schedule alone, so a ``Program`` is made once
per (parallel sizes, microbatches). A step of very many microbatches is as quickly made as a short one:
what repeats is a round (``schedule.Steady``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, repeat
from typing import NamedTuple

from megatron_lynx import schedule
from megatron_lynx.schedule import Action, Steady
from megatron_lynx.spec import Parallel


class Op(NamedTuple):
    """One action of a Program: ``key`` finds its times in the tables of all ranks laid end to end,
    ``back`` is how many ops before this one the op stands whose result must arrive (0: none), ``link``
    the link that its own result takes (-1: none)."""

    rank: int
    key: int
    back: int
    link: int


@dataclass(frozen=True, slots=True)
class Program:
    """All actions of all ranks, each after what it requires: ``head``, ``rounds`` times ``body``, ``tail``.

    The head ends with a round in the order of the body, which reaches back into the round before at
    most. A rank's table has ``width`` entries: forwards by (chunk, chunk served or none), then
    backwards by (chunk, chunk of the forward that served it or none); see ``SimStage``. ``listed`` are the
    actions of head, body and tail; those of the tail are numbered as if the body ran once, and a body
    is ``size`` microbatches on from the one before.
    """

    ranks: int
    chunks: int
    head: tuple[Op, ...]
    body: tuple[Op, ...]
    tail: tuple[Op, ...]
    rounds: int
    listed: tuple[Action, ...]
    size: int = 0

    @property
    def width(self) -> int:
        """Entries of one rank's table."""
        return 2 * self.chunks * (self.chunks + 1)

    @property
    def ops(self) -> Iterator[Op]:
        """Every op, one by one."""
        return chain(self.head, chain.from_iterable(repeat(self.body, self.rounds)), self.tail)

    @property
    def actions(self) -> Iterator[Action]:
        """The action of every op."""
        first, last = len(self.head), len(self.head) + len(self.body)
        yield from self.listed[:first]
        for number in range(self.rounds):
            yield from _later(self.listed[first:last], number * self.size)
        yield from _later(self.listed[last:], (self.rounds - 1) * self.size if self.body else 0)


def _later(actions: Sequence[Action], microbatches: int) -> Iterator[Action]:
    return (replace(action, microbatch=action.microbatch + microbatches) for action in actions)


def variant(chunks: int, action: Action, partner: int | None) -> int:
    """Index of an action in its rank's table; ``partner`` is the chunk served or serving."""
    row = action.chunk if action.forward else chunks + action.chunk
    return row * (chunks + 1) + (chunks if partner is None else partner)


def program(parallel: Parallel, microbatches: int) -> Program:
    """Order the actions of all ranks so that each stands after what it requires."""
    return _program(schedule.pipeline_of(parallel), microbatches)


@lru_cache(maxsize=32)
def _program(parallel: Parallel, microbatches: int) -> Program:
    steady = schedule.steady(parallel, microbatches)
    if steady is None:
        order = _Order(parallel, microbatches)
        order.run([len(actions) for actions in order.orders])
        return Program(parallel.pp, parallel.vpp, tuple(order.ops), (), (), 0, tuple(order.listed))
    return _with_rounds(steady, microbatches)


def _with_rounds(steady: Steady, microbatches: int) -> Program:
    parallel = steady.parallel
    order = _Order(parallel, steady.microbatches)
    begins = [steady.begin(rank) for rank in range(parallel.pp)]
    order.run(begins)
    order.run([begin + steady.length for begin in begins])
    first = len(order.ops)
    order.run([begin + 2 * steady.length for begin in begins])
    last = len(order.ops)
    order.run([len(actions) for actions in order.orders])
    return Program(
        ranks=parallel.pp,
        chunks=parallel.vpp,
        head=tuple(order.ops[:first]),
        body=tuple(order.ops[first:last]),
        tail=tuple(order.ops[last:]),
        rounds=1 + (microbatches - steady.microbatches) // steady.size,
        listed=tuple(order.listed),
        size=steady.size,
    )


def counts(parallel: Parallel, microbatches: int) -> tuple[dict[int, int], ...]:
    """How often each entry of each rank's table occurs in a step."""
    return _counts(schedule.pipeline_of(parallel), microbatches)


@lru_cache(maxsize=256)
def _counts(parallel: Parallel, microbatches: int) -> tuple[dict[int, int], ...]:
    prog = _program(parallel, microbatches)
    found = [Counter[int]() for _ in range(prog.ranks)]
    for ops, times in ((prog.head, 1), (prog.body, prog.rounds), (prog.tail, 1)):
        for op in ops:
            found[op.rank][op.key - op.rank * prog.width] += times
    return tuple(map(dict, found))


class _Order:
    """The actions of a step as ops, in an order in which they can run."""

    def __init__(self, parallel: Parallel, microbatches: int) -> None:
        self.stages, self.chunks = parallel.pp, parallel.vpp
        self.orders = schedule.schedule(parallel, microbatches)
        self.ops: list[Op] = []
        self.listed: list[Action] = []
        self._done: dict[tuple[int, Action], int] = {}
        self._at = [0] * parallel.pp

    def run(self, until: Sequence[int]) -> None:
        """Go on until each rank has come to its position."""
        at, done = self._at, self._done
        while any(here < there for here, there in zip(at, until, strict=True)):
            for rank, order in enumerate(self.orders):
                while at[rank] < until[rank]:
                    action = order[at[rank]]
                    needs = schedule.requires(action, rank, self.stages, self.chunks)
                    if any(need not in done for need in needs):
                        break
                    self._add(rank, order, at[rank], [done[need] for need in needs if need[0] != rank])
                    at[rank] += 1

    def _add(self, rank: int, order: Sequence[Action], position: int, sources: Sequence[int]) -> None:
        here, action = len(self.ops), order[position]
        self._done[rank, action] = here
        key = variant(self.chunks, action, _partner(order, position))
        width = 2 * self.chunks * (self.chunks + 1)
        self.ops.append(
            Op(
                rank=rank,
                key=rank * width + key,
                back=here - sources[0] if sources else 0,
                link=_link(action, rank, self.stages, self.chunks),
            )
        )
        self.listed.append(action)


def _partner(order: Sequence[Action], position: int) -> int | None:
    """The chunk that a forward serves, or that of the forward that served a backward."""
    if order[position].forward:
        served = schedule.serves(order, position)
        return None if served is None else served.chunk
    if position and schedule.serves(order, position - 1) is not None:
        return order[position - 1].chunk
    return None


def _link(action: Action, rank: int, stages: int, chunks: int) -> int:
    """The link that the result takes: 2 rank to the next rank, 2 rank + 1 to the previous one."""
    if stages == 1:
        return -1
    if action.forward:
        last = rank == stages - 1 and action.chunk == chunks - 1
        return -1 if last else 2 * rank
    return -1 if rank == 0 and action.chunk == 0 else 2 * rank + 1
