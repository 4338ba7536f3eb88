"""The order in which each pipeline rank runs its microbatches, and what waits for what.

An action is one pass of one microbatch through one model chunk: ``F2.0`` is the forward pass of
microbatch 2 through chunk 0, ``B2.0`` its backward pass. A rank's schedule is a tuple of actions;
the orders are Megatron's own (``core/pipeline_parallel/schedules.py``). Ranks and chunks together
form *virtual stages*: virtual stage ``chunk * stages + stage`` holds the next layers in order.

Rules that have their only home here: what an action waits for (``requires``), which forward pass
opens its windows for which backward pass (``serves``), and what is alive (``in_flight``,
``turns``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_lynx.errors import ConfigError
from megatron_lynx.spec import Parallel

_ACTION = re.compile(r"([FB])(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass of a microbatch through a model chunk; text form ``F2.0`` or ``B2.0``."""

    kind: Literal["F", "B"]
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"

    @property
    def forward(self) -> bool:
        """Whether this is a forward pass."""
        return self.kind == "F"


def parse_action(text: str) -> Action:
    """The inverse of ``str`` on an action.

    Raises:
        ValueError: the text is not of the form ``F2.0`` or ``B2.0``.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"action {text!r} is not of the form F2.0 or B2.0")
    kind: Literal["F", "B"] = "F" if match.group(1) == "F" else "B"
    return Action(kind, int(match.group(2)), int(match.group(3)))


def format_actions(order: Sequence[Action]) -> str:
    """One line: the actions of a rank in order, separated by blanks."""
    return " ".join(map(str, order))


def parse_actions(text: str) -> tuple[Action, ...]:
    """The inverse of ``format_actions``.

    Raises:
        ValueError: a word is not an action.
    """
    return tuple(map(parse_action, text.split()))


def _weave(order: Sequence[tuple[int, int]], warmup: int, chunks: int) -> tuple[Action, ...]:
    """Warm-up forwards, then a forward and a backward in turn, then the other backwards.

    ``order`` lists (microbatch, chunk) of the forwards; backwards follow the same list with the
    chunks counted from the other end.
    """
    forwards = [Action("F", microbatch, chunk) for microbatch, chunk in order]
    backwards = [Action("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in order]
    warmup = min(warmup, len(forwards))
    woven = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        woven += [forward, backward]
    return tuple(woven + backwards[len(forwards) - warmup :])


def one_f_one_b(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """1F1B on one rank: ``stages - stage - 1`` forwards, then one forward and one backward in turn.

    With one stage this is Megatron's schedule without a pipeline: ``F0 B0 F1 B1 ...``.
    """
    _check_place(stage, stages, microbatches)
    return _weave([(mb, 0) for mb in range(microbatches)], stages - stage - 1, 1)


def interleaved(
    stage: int, stages: int, chunks: int, microbatches: int, group_size: int
) -> tuple[Action, ...]:
    """Interleaved 1F1B on one rank, in Megatron's order.

    ``group_size`` microbatches run through one chunk before the next chunk takes over; the last
    group may be smaller. Warm-up: ``2 (stages - stage - 1) + (chunks - 1) group_size`` forwards.

    Raises:
        ConfigError: a group size or a number of microbatches that Megatron refuses.
    """
    _check_place(stage, stages, microbatches)
    _check_groups(stages, microbatches, group_size)
    order = [
        (microbatch, chunk)
        for first in range(0, microbatches, group_size)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group_size, microbatches))
    ]
    return _weave(order, 2 * (stages - stage - 1) + (chunks - 1) * group_size, chunks)


def check_microbatches(parallel: Parallel, microbatches: int) -> None:
    """Check that Megatron runs a step of so many microbatches.

    Raises:
        ConfigError: it refuses them.
    """
    _check_place(0, parallel.pp, microbatches)
    if parallel.vpp > 1:
        _check_groups(parallel.pp, microbatches, parallel.group_size)


def _check_groups(stages: int, microbatches: int, group_size: int) -> None:
    rest = microbatches % group_size if group_size > 0 else 0
    if not stages <= group_size <= microbatches:
        raise ConfigError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group_size} must lie between "
            f"--pp {stages} and the {microbatches} microbatches of a step; "
            f"{stages} works with at least {stages} microbatches"
        )
    if 0 < rest < stages:
        raise ConfigError(
            f"{microbatches} microbatches in groups of {group_size} leave a last group of {rest}, "
            f"fewer than --pp {stages}; {microbatches - rest} microbatches work"
        )


def _check_place(stage: int, stages: int, microbatches: int) -> None:
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages} stages")
    if microbatches < 1:
        raise ConfigError(f"a step of {microbatches} microbatches is empty; 1 works")


@lru_cache(maxsize=512)
def actions(parallel: Parallel, microbatches: int, stage: int) -> tuple[Action, ...]:
    """The actions of rank ``stage``: 1F1B, or interleaved 1F1B when ``vpp`` is above 1.

    Raises:
        ConfigError: Megatron would refuse this number of microbatches.
    """
    if parallel.vpp == 1:
        return one_f_one_b(stage, parallel.pp, microbatches)
    return interleaved(stage, parallel.pp, parallel.vpp, microbatches, parallel.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The rounds of a step that repeat: in each, every rank runs the same actions for later microbatches.

    ``microbatches`` are those of the shortest step with the same beginning and end and two rounds
    between them, ``size`` those of a round. Rank ``r`` begins its first round at position
    ``begin(r)``, and a round has ``length`` actions; what a round waits for is in it or in the one before.
    """

    parallel: Parallel
    microbatches: int
    size: int

    @property
    def length(self) -> int:
        """Actions of one rank in a round."""
        return 2 * self.size * self.parallel.vpp

    def begin(self, stage: int) -> int:
        """Where the first round begins: after the warm-up; with chunks also after a forward and a
        backward for each rank before, so that no round waits for a later one of another rank."""
        return _warmup(self.parallel, stage) + (2 * stage if self.parallel.vpp > 1 else 0)


def steady(parallel: Parallel, microbatches: int) -> Steady | None:
    """The rounds of a step, if it has more than two."""
    if parallel.vpp == 1:
        size, least = 1, parallel.pp + 1
    else:
        size = parallel.group_size
        forwards = _warmup(parallel, 0) + 2 * size * parallel.vpp
        least = -(-forwards // (size * parallel.vpp)) * size + microbatches % size
    return Steady(parallel=parallel, microbatches=least, size=size) if microbatches > least else None


def _warmup(parallel: Parallel, stage: int) -> int:
    """Forwards before the first backward's own."""
    after = parallel.pp - stage - 1
    return after if parallel.vpp == 1 else 2 * after + (parallel.vpp - 1) * parallel.group_size


def _shortened(parallel: Parallel, microbatches: int) -> int:
    """Fewer microbatches, if a step of so many is the same but for rounds that repeat."""
    found = steady(parallel, microbatches)
    return microbatches if found is None else found.microbatches


def schedule(parallel: Parallel, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank."""
    return tuple(actions(parallel, microbatches, stage) for stage in range(parallel.pp))


def requires(action: Action, stage: int, stages: int, chunks: int) -> tuple[tuple[int, Action], ...]:
    """*The* dependency rule: the (stage, action) pairs that must end before ``action`` starts.

    A forward needs the forward of the virtual stage before it. A backward needs its own forward,
    and the backward of the virtual stage after it. Pairs on another stage come over the pipeline
    link. That a rank runs one action at a time, in its order, is not part of the rule.
    """
    mb, chunk = action.microbatch, action.chunk
    if action.forward:
        if stage > 0:
            return ((stage - 1, Action("F", mb, chunk)),)
        return ((stages - 1, Action("F", mb, chunk - 1)),) if chunk > 0 else ()
    own = (stage, Action("F", mb, chunk))
    if stage < stages - 1:
        return own, (stage + 1, Action("B", mb, chunk))
    return (own, (0, Action("B", mb, chunk + 1))) if chunk < chunks - 1 else (own,)


def waits_for_gradient(action: Action, stage: int, stages: int, chunks: int) -> bool:
    """Whether ``action`` is a backward that receives its gradient over the pipeline link.

    Before such a backward there may be a stall, in which its activations can be rebuilt.
    """
    return not action.forward and any(other != stage for other, _ in requires(action, stage, stages, chunks))


def backward_order(order: Sequence[Action]) -> tuple[Action, ...]:
    """The backward passes of a rank in the order in which they run."""
    return tuple(action for action in order if not action.forward)


def next_backward(order: Sequence[Action], position: int) -> Action | None:
    """The first backward pass after ``position``; None if there is none."""
    return next((action for action in order[position + 1 :] if not action.forward), None)


def serves(order: Sequence[Action], position: int) -> Action | None:
    """The backward pass that the forward windows of the action at ``position`` serve.

    It is the backward that comes right after this forward, unless that is the backward of the very
    same pass, whose activations do not exist yet. None in the warm-up, for a backward, and for
    every forward of a rank that runs each backward right after its own forward.
    """
    here = order[position]
    if not here.forward or position + 1 >= len(order):
        return None
    after = order[position + 1]
    own = after.microbatch == here.microbatch and after.chunk == here.chunk
    return None if after.forward or own else after


def _alive(order: Sequence[Action]) -> Iterator[tuple[int, ...]]:
    """Microbatches per chunk whose activations are alive during each action."""
    alive = [0] * (1 + max(action.chunk for action in order))
    for action in order:
        if action.forward:
            alive[action.chunk] += 1
        yield tuple(alive)
        if not action.forward:
            alive[action.chunk] -= 1


def in_flight(
    parallel: Parallel, microbatches: int, stage: int, weights: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Microbatches alive per chunk of rank ``stage`` at the moment when most memory is held.

    1F1B: ``min(microbatches, pp - stage)``. ``weights`` are the kept bytes (or layers) of each
    chunk per microbatch; without them all chunks count the same. The first such moment is meant.
    """
    return _in_flight(pipeline_of(parallel), _shortened(parallel, microbatches), stage, weights)


def pipeline_of(parallel: Parallel) -> Parallel:
    """The sizes that a schedule depends on."""
    return Parallel(pp=parallel.pp, vpp=parallel.vpp, microbatch_group_size=parallel.microbatch_group_size)


@lru_cache(maxsize=65536)
def _in_flight(
    parallel: Parallel, microbatches: int, stage: int, weights: tuple[int, ...] | None
) -> tuple[int, ...]:
    scale = weights or (1,) * parallel.vpp
    return max(
        _alive(actions(parallel, microbatches, stage)),
        key=lambda alive: sum(n * weight for n, weight in zip(alive, scale, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How the backward passes of one chunk come.

    ``moments`` say what may be alive while the chunk runs backward, as microbatches of each chunk, its
    own included; a moment that another one exceeds in every chunk is left out. ``served``: a forward
    pass just before opens its windows for it. ``waits``: its gradient comes over the pipeline link, so
    that there may be a stall before.
    """

    moments: tuple[tuple[int, ...], ...]
    served: bool = True
    waits: bool = True


def turns(parallel: Parallel, microbatches: int, stage: int) -> tuple[Turn, ...]:
    """The turns of every chunk of rank ``stage``.

    A forward that serves a backward runs just before it, so what is alive then is the same. The
    backwards of the cool-down are not served, but no more is alive than in some served one before.
    """
    return _turns(pipeline_of(parallel), _shortened(parallel, microbatches), stage)


@lru_cache(maxsize=4096)
def _turns(parallel: Parallel, microbatches: int, stage: int) -> tuple[Turn, ...]:
    order = actions(parallel, microbatches, stage)
    seen: list[set[tuple[int, ...]]] = [set() for _ in range(parallel.vpp)]
    served: list[set[tuple[int, ...]]] = [set() for _ in range(parallel.vpp)]
    for position, (action, alive) in enumerate(zip(order, _alive(order), strict=True)):
        if not action.forward:
            seen[action.chunk].add(alive)
            if position and serves(order, position - 1) is not None:
                served[action.chunk].add(alive)
    last = stage == parallel.pp - 1
    found = []
    for chunk, alive_there in enumerate(seen):
        moments = _unexceeded(alive_there)
        ends = last and chunk == parallel.vpp - 1
        found.append(
            Turn(
                moments=moments, served=served[chunk].issuperset(moments), waits=parallel.pp > 1 and not ends
            )
        )
    return tuple(found)


def _unexceeded(moments: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The moments that no other one exceeds."""

    def exceeds(other: tuple[int, ...], one: tuple[int, ...]) -> bool:
        return other != one and all(a >= b for a, b in zip(other, one, strict=True))

    return tuple(sorted(one for one in moments if not any(exceeds(other, one) for other in moments)))
