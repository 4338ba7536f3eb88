"""What one rank finds out, told to all of them: results and errors alike.

A rank that fails alone would leave the others waiting in a collective for ever. What may fail on some
ranks only runs inside ``on_every_rank`` or ``from_rank_0``: then it fails on all of them, before the
next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron_lynx.errors import LynxError, RankError

T = TypeVar("T")


def gathered(own: Any) -> list[Any]:
    """``own`` of every rank, in their order. Every rank must call it."""
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def on_every_rank(make: Callable[[], T]) -> T:
    """``make()`` of this rank, which must not communicate. Every rank must call it.

    Raises:
        Exception: what ``make`` raised on this rank.
        LynxError: what it raised on the lowest rank where it did, if it did not on this one.
    """
    own: list[T] = []
    error: Exception | None = None
    try:
        own.append(make())
    except Exception as failed:
        error = failed
    failures = gathered(None if error is None else _portable(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise _from_rank(rank, failure)
    return own[0]


def from_rank_0(make: Callable[[], str]) -> str:
    """``make()`` of rank 0 on every rank. Every rank must call it.

    Raises:
        Exception: what ``make`` raised, on rank 0.
        LynxError: the same, or what says it, on the other ranks.
    """
    box: list[Any] = [None, None]
    error: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as failed:
            error = failed
            box[1] = _portable(failed)
    torch.distributed.broadcast_object_list(box, src=0)
    if error is not None:
        raise error
    if box[1] is not None:
        raise _from_rank(0, box[1])
    return str(box[0])


def _portable(error: Exception) -> LynxError:
    """``error`` itself if it is lynx's own, which travel by pickle; else one with its text."""
    return error if isinstance(error, LynxError) else RankError(f"{type(error).__name__}: {error}")


def _from_rank(rank: int, error: LynxError) -> LynxError:
    return RankError(f"rank {rank} failed: {error}") if isinstance(error, RankError) else error
