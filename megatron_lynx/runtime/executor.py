"""Executor: carries out one stage's plan while Megatron trains.

It makes a tape for every layer that runs forward, knows which microbatch runs backward next, and
rebuilds what the plan assigns to a window when that window opens. It decides nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lynx.plan import StagePlan, Window
from megatron_lynx.runtime.census import Census
from megatron_lynx.runtime.clock import HostClock
from megatron_lynx.runtime.glue import GlueSite
from megatron_lynx.runtime.program import LayerProgram
from megatron_lynx.runtime.quiet import QuietCall
from megatron_lynx.runtime.record import StepRecord
from megatron_lynx.runtime.rng import RandomSource
from megatron_lynx.runtime.storage import Known
from megatron_lynx.runtime.tape import LayerTape
from megatron_lynx.schedule import Action, next_backward, serves

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Microbatch:
    """The tapes of one model chunk for one microbatch, by global layer index."""

    chunk: int
    tapes: dict[int, LayerTape] = field(default_factory=dict)
    forward_done: bool = False
    backward_begun: bool = False
    carried: Known | None = None

    def is_gone(self) -> bool:
        """Whether no backward will come: what its tapes hold is wanted by nobody."""
        return self.forward_done and bool(self.tapes) and all(tape.is_over() for tape in self.tapes.values())


class Executor:
    """Runs one StagePlan.

    Args:
        plan: what to drop and where to rebuild it.
        programs: the same for each layer, as its tapes carry it out.
        rng: random state, Megatron's tracker included.
        device: where the layers run.
        group: the layers' tensor-parallel process group; only its collectives open windows.
        forward_slots: names of a layer's collectives in the forward (``LayerKind``).
        backward_slots: those in the backward, by layer: a frozen one does without some.
        count_kept: count what each layer keeps, in its first microbatch.
    """

    def __init__(
        self,
        plan: StagePlan,
        programs: Mapping[int, LayerProgram],
        *,
        rng: RandomSource,
        device: torch.device,
        group: Any,
        forward_slots: Sequence[str],
        backward_slots: Mapping[int, Sequence[str]],
        count_kept: bool = False,
    ) -> None:
        self.plan = plan
        self.programs = programs
        self.sites: dict[int, dict[str, GlueSite | QuietCall]] = {}
        self.rng = rng
        self.device = device
        self.group = group
        self.forward_slots = tuple(forward_slots)
        self.backward_slots = backward_slots
        self.active: Any = None
        self.record = StepRecord()
        self.clock = HostClock()
        self._actions: tuple[Action, ...] = ()
        self._position = -1
        self._due = plan.windows()
        self._place = {
            layer: (chunk, i) for chunk, ids in enumerate(plan.chunks) for i, layer in enumerate(ids)
        }
        self._listening = {ids[-1] for ids in plan.chunks if ids}
        self._listening |= {window.layer for window in self._due if window.kind == "bwd"}
        self._uncounted: set[int] = set(self._place) if count_kept else set()
        self._kept_bytes: dict[int, int] = {}
        self._pending: dict[int, deque[Microbatch]] = {c: deque() for c in range(len(plan.chunks))}
        self._backward: tuple[int, Microbatch] | None = None
        self._frozen: set[int] = set()
        self._collectives = 0
        self._replaying = 0
        self._where: Window | None = None

    @property
    def hooking(self) -> bool:
        """Whether saved tensors pass through a tape just now."""
        return isinstance(self.active, LayerTape) and self.active.hooking

    def is_idle(self) -> bool:
        """Whether the plan asks for nothing on this stage."""
        return not any(program.steps for program in self.programs.values())

    def watches(self, layer: int) -> bool:
        """Whether anything must be known of ``layer``'s passes: it drops something, it is an end of its
        chunk, which tells where the schedule stands, or one of its collectives is a window that is used.

        What a layer keeps is counted in its first microbatch, so then it is watched too.
        """
        if layer in self._uncounted:
            return True
        if self.is_idle():
            return False
        ends = self._place[layer][1] == 0 or layer in self._listening
        forward = any(window.kind == "fwd" for window in self._due)
        return ends or forward or bool(self.programs[layer].steps)

    def hears(self, region: str) -> bool:
        """Whether it must be known that ``region`` runs: its collective is a window that is used."""
        return region in self.forward_slots and any(window.kind == "fwd" for window in self._due)

    # --- steps ---------------------------------------------------------------------------------

    def begin_step(self, actions: Sequence[Action] = ()) -> None:
        """Forget everything and start a step.

        ``actions`` is this stage's schedule. Without it the oldest microbatch whose forward is over
        counts as the next to run backward, which is right for 1F1B.
        """
        self.clear()
        self._actions = tuple(
            action
            for action in actions
            if self.plan.chunks[action.chunk] and (action.kind == "F" or action.chunk not in self._frozen)
        )
        self.record = StepRecord(kept_bytes=dict(self._kept_bytes))

    def clear(self) -> None:
        """Forget every microbatch. What a graph still holds stays, and can be rebuilt on demand."""
        for queue in self._pending.values():
            queue.clear()
        self._position = -1
        self._backward = self.active = self._where = None

    def open_tapes(self) -> list[LayerTape]:
        """Tapes of which something is still wanted."""
        waiting = [mb for queue in self._pending.values() for mb in queue]
        if self._backward is not None:
            waiting.append(self._backward[1])
        return [tape for mb in waiting for tape in mb.tapes.values() if not tape.is_over()]

    # --- layers --------------------------------------------------------------------------------

    def run_layer(
        self,
        layer: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a layer's own forward under a tape; without gradients, run it as it is."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        microbatch = self._microbatch_of(layer)
        self._backward = None
        tape = LayerTape(self.programs[layer], self.sites.get(layer, {}), self)
        if tape.program.steps:
            microbatch.tapes[layer] = tape
        hidden = args[0] if args else kwargs["hidden_states"]
        others = (args[1:], {k: v for k, v in kwargs.items() if v is not hidden})
        previous, self.active = self.active, tape
        try:
            run = Census(tape).counting if layer in self._uncounted else tape.run
            out, passed = run(lambda: forward(*args, **kwargs), hidden, others, microbatch.carried)
        finally:
            self.active = previous
        if layer in self._uncounted:
            self._count(tape)
        microbatch.carried = passed
        output = out[0] if isinstance(out, tuple) else out
        if layer == self.plan.chunks[microbatch.chunk][-1]:
            microbatch.forward_done = True
            microbatch.carried = None
            self._note_backward(microbatch.chunk, comes=output.requires_grad)
        if layer in self._listening and output.requires_grad:
            output.register_hook(lambda _: self._begin_backward(layer, microbatch))
        return out

    def _note_backward(self, chunk: int, *, comes: bool) -> None:
        """A chunk whose output needs no gradient (nothing up to it trains) never runs backward."""
        if comes:
            self._frozen.discard(chunk)
        elif chunk not in self._frozen:
            self._frozen.add(chunk)
            self._actions = tuple(a for a in self._actions if a.kind == "F" or a.chunk != chunk)

    def _count(self, tape: LayerTape) -> None:
        """Note what a layer keeps, once."""
        self._uncounted.discard(tape.layer)
        self._kept_bytes[tape.layer] = self.record.kept_bytes[tape.layer] = tape.kept_bytes

    def _microbatch_of(self, layer: int) -> Microbatch:
        chunk, place = self._place[layer]
        queue = self._pending[chunk]
        if place == 0 or not queue or queue[-1].forward_done:
            self._advance("F", chunk)
            while queue and queue[0].is_gone():
                queue.popleft()
            queue.append(Microbatch(chunk))
        return queue[-1]

    def _advance(self, kind: str, chunk: int) -> None:
        """The schedule has come to its next action. Where the passes that run are not those of the
        schedule (a second forward in one step function), the oldest microbatch counts as the next."""
        self._position += 1
        if self._position < len(self._actions):
            planned = self._actions[self._position]
            if (planned.kind, planned.chunk) != (kind, chunk):
                _log.warning(
                    "lynx: %s of chunk %d ran where the schedule has %s; windows serve the oldest microbatch "
                    "for the rest of this step", kind, chunk, planned,
                )  # fmt: skip
                self._actions = ()

    def _begin_backward(self, layer: int, microbatch: Microbatch) -> None:
        if not microbatch.backward_begun:
            microbatch.backward_begun = True
            self._advance("B", microbatch.chunk)
            if microbatch in self._pending[microbatch.chunk]:
                self._pending[microbatch.chunk].remove(microbatch)
        self._backward, self._collectives = (layer, microbatch), 0

    # --- windows -------------------------------------------------------------------------------

    def collective_window(self, group: Any, *, asynchronous: bool) -> Window | None:
        """The window that a collective over ``group``, about to start, opens; None for none.

        ``asynchronous`` tells whether Megatron itself starts it so. Collectives of replays open
        none: what they wait for is not idle time that was planned.
        """
        if self._replaying or group is not self.group:
            return None
        if isinstance(self.active, LayerTape):
            region = self.active.region
            return Window("fwd", self.active.layer, region) if region in self.forward_slots else None
        if self._backward is None:
            # Outside the layers only the output layer's backward starts collectives asynchronously.
            return Window("head") if asynchronous and self._next_done() is not None else None
        position, self._collectives = self._collectives, self._collectives + 1
        layer = self._backward[0]
        slots = self.backward_slots[layer]
        return Window("bwd", layer, slots[position]) if position < len(slots) else None

    def is_due(self, window: Window) -> bool:
        """Whether the plan puts anything into ``window``; if not, the wait stays as it is."""
        return window.kind in ("stall", "head") or window in self._due or len(self.plan.chunks) > 1

    def stall_window(self) -> Window | None:
        """The window of a wait for a gradient from the next stage."""
        return None if self._replaying or self._next_done() is None else Window("stall")

    def run_window(self, window: Window) -> bool:
        """Rebuild what the plan assigns to ``window`` (Rule 7); whether that was anything."""
        target, due = self._target_of(window)
        if target is None or not due:
            return False
        previous, self._where = self._where, window
        before = self.record.rebuilt_storages[window.kind]
        try:
            for layer, label in due:
                tape = target.tapes.get(layer)
                if tape is not None:
                    tape.rebuild_label(label)
        finally:
            self._where = previous
        return self.record.rebuilt_storages[window.kind] > before

    def pass_window(self, window: Window, wait: Callable[[], Any]) -> Any:
        """Do what is due in ``window``, then ``wait``, and record how long each took."""
        clock, one = self.clock, self.record.windows[window]
        start = clock.mark()
        worked = self.run_window(window)
        middle = clock.mark()
        result = wait()
        end = clock.mark()
        if worked:
            one.opened += 1
            clock.span(start, middle, one.worked)
            clock.span(middle, end, one.waited)
        else:
            one.empty += 1
            clock.span(start, end, one.idled)
        return result

    def _target_of(self, window: Window) -> tuple[Microbatch | None, Sequence[tuple[int, str]]]:
        """The microbatch that a window serves, and what is due in it."""
        if window.kind == "bwd":
            # The wait may come after the last tape has finished: then nothing is due any more.
            target = self._backward[1] if self._backward else None
            return target, self._due.get(window, ())
        target = self._served_by_forward() if window.kind == "fwd" else self._next_done()
        if target is None:
            return None, ()
        if window.kind == "fwd":
            # The window at the same place of the forward pass before this chunk's backward.
            ids = self.plan.chunks[target.chunk]
            place = self._place[window.layer][1]
            if place >= len(ids):
                return None, ()
            return target, self._due.get(Window("fwd", ids[place], window.slot), ())
        due = list(self._due.get(window, ()))
        if window.kind == "stall":  # in the cooldown no forward pass has come to do these
            late = [pair for when, pairs in self._due.items() if when.kind == "fwd" for pair in pairs]
            due = [*late, *due]
        return target, due

    def _served_by_forward(self) -> Microbatch | None:
        """The microbatch that the windows of the forward pass that runs now serve."""
        if not self._actions:
            return self._next_done()
        action = serves(self._actions, self._position)
        return None if action is None else self._first_waiting(action.chunk)

    def _next_done(self) -> Microbatch | None:
        """The microbatch that runs backward next, if its forward pass is over."""
        action = next_backward(self._actions, self._position)
        return self._first_waiting(len(self.plan.chunks) - 1 if action is None else action.chunk)

    def _first_waiting(self, chunk: int) -> Microbatch | None:
        """The oldest microbatch of ``chunk`` whose forward is over and whose backward is to come."""
        queue = self._pending[chunk]
        while queue and queue[0].is_gone():
            queue.popleft()
        return queue[0] if queue and queue[0].forward_done else None

    # --- the tapes' host -----------------------------------------------------------------------

    def begin_replay(self, replay: Any) -> Any:
        """Collectives are plain and open no windows until it is over; it answers the layer's parts."""
        previous, self.active = self.active, replay
        self._replaying += 1
        # Work in a window is timed as a whole.
        return previous, self.clock.mark() if self._where is None else None

    def end_replay(self, began: Any, layer: int, storages: int, size_bytes: int) -> None:
        """A replay of ``layer`` gave memory back to ``storages`` storages."""
        self.active, start = began
        self._replaying -= 1
        self.record.rebuilt(self._where, storages, size_bytes)
        if self._where is None:
            one = self.record.demand[layer]
            one.replays += 1
            self.clock.span(start, self.clock.mark(), one.took)
