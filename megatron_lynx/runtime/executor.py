"""Executor: carries out one stage's plan while Megatron trains.

It makes a tape for every layer that runs forward, knows which microbatch runs backward next, and
rebuilds what the plan assigns to a window when that window opens. It decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lynx.graph import INPUT
from megatron_lynx.plan import StagePlan, Window
from megatron_lynx.runtime.clock import HostClock
from megatron_lynx.runtime.record import StepRecord
from megatron_lynx.runtime.rng import RandomSource
from megatron_lynx.runtime.storage import TapeStorage
from megatron_lynx.runtime.tape import LayerTape, TapePlan
from megatron_lynx.schedule import Action, next_backward, serves


@dataclass(slots=True)
class Microbatch:
    """The tapes of one model chunk for one microbatch, by global layer index."""

    chunk: int
    tapes: dict[int, LayerTape] = field(default_factory=dict)
    forward_done: bool = False
    backward_begun: bool = False
    carried: TapeStorage | None = None


class KeptLayer:
    """A layer that keeps everything: it has no tape, and only tells which region runs."""

    __slots__ = ("layer", "region")

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.region = ""

    def parent(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A parent module runs."""
        return call(*args, **kwargs)

    def record(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A region runs."""
        self.region = name
        try:
            return call(*args, **kwargs)
        finally:
            self.region = ""


class Executor:
    """Runs one StagePlan.

    Args:
        plan: what to drop and where to rebuild it.
        rng: random state, Megatron's tracker included.
        device: where the layers run.
        group: the layers' tensor-parallel process group; only its collectives open windows.
        forward_slots, backward_slots: names of a layer's collectives (``gpt``).
        draws: regions that use random state in this model.
        communicates: regions that issue collectives.
        count_kept: count kept bytes of layers that drop nothing too; such layers need no tape else.
    """

    def __init__(
        self,
        plan: StagePlan,
        *,
        rng: RandomSource,
        device: torch.device,
        group: Any,
        forward_slots: Sequence[str],
        backward_slots: Sequence[str],
        draws: frozenset[str] = frozenset(),
        communicates: frozenset[str] = frozenset(),
        count_kept: bool = False,
    ) -> None:
        self.plan = plan
        self.rng = rng
        self.device = device
        self.group = group
        self.forward_slots = tuple(forward_slots)
        self.backward_slots = tuple(backward_slots)
        self.active: Any = None
        self.record = StepRecord()
        self.clock = HostClock()
        self._actions: tuple[Action, ...] = ()
        self._position = -1
        self._due = plan.windows()
        self._place = {
            layer: (chunk, i) for chunk, ids in enumerate(plan.chunks) for i, layer in enumerate(ids)
        }
        self._tape_plans = _tape_plans(plan, draws, communicates)
        self._kept: set[int] = set() if count_kept else _kept_layers(plan, self._tape_plans)
        self._pending: dict[int, deque[Microbatch]] = {c: deque() for c in range(len(plan.chunks))}
        self._backward: tuple[int, Microbatch] | None = None
        self._collectives = 0
        self._replaying = 0
        self._where: Window | None = None
        self._replay: tuple[Any, Any] = (0, 0)

    # --- steps ---------------------------------------------------------------------------------

    def begin_step(self, actions: Sequence[Action] = ()) -> None:
        """Forget everything and start a step.

        ``actions`` is this stage's schedule. Without it the oldest microbatch whose forward is over
        counts as the next to run backward, which is right for 1F1B.
        """
        self.clear()
        self._actions = tuple(actions)
        self.record = StepRecord()

    def clear(self) -> None:
        """Let go of every tape, finished or not."""
        for queue in self._pending.values():
            for microbatch in queue:
                for tape in microbatch.tapes.values():
                    tape.clear()
            queue.clear()
        self._position = -1
        self._backward = self.active = None

    def open_tapes(self) -> list[LayerTape]:
        """Tapes that still wait for their backward."""
        return [tape for queue in self._pending.values() for mb in queue for tape in mb.tapes.values()]

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
        if layer in self._kept:
            out = self._run_active(KeptLayer(layer), forward, args, kwargs)
        else:
            out = self._run_taped(layer, microbatch, forward, args, kwargs)
        if layer == self.plan.chunks[microbatch.chunk][-1]:
            microbatch.forward_done = True
            microbatch.carried = None
        output = out[0] if isinstance(out, tuple) else out
        if output.requires_grad:
            output.register_hook(lambda _: self._begin_backward(layer, microbatch))
        return out

    def _run_taped(
        self,
        layer: int,
        microbatch: Microbatch,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        tape = LayerTape(self._tape_plans[layer], self)
        hidden = args[0] if args else kwargs["hidden_states"]
        others = {k: v for k, v in kwargs.items() if v is not hidden}
        tape.begin(hidden, (args[1:], others), microbatch.carried)
        microbatch.tapes[layer] = tape
        with torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack):
            out = self._run_active(tape, forward, args, kwargs)
        tape.end(out[0] if isinstance(out, tuple) else out)
        microbatch.carried = tape.output
        self.record.kept_bytes[layer] = tape.held_bytes()
        return out

    def _run_active(
        self, active: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        previous, self.active = self.active, active
        try:
            return forward(*args, **kwargs)
        finally:
            self.active = previous

    def _microbatch_of(self, layer: int) -> Microbatch:
        chunk, place = self._place[layer]
        if place == 0:
            self._advance("F", chunk)
            self._pending[chunk].append(Microbatch(chunk))
        return self._pending[chunk][-1]

    def _advance(self, kind: str, chunk: int) -> None:
        self._position += 1
        if self._position < len(self._actions):
            planned = self._actions[self._position]
            assert (planned.kind, planned.chunk) == (kind, chunk), f"{kind}.{chunk} ran, not {planned}"

    def _begin_backward(self, layer: int, microbatch: Microbatch) -> None:
        if not microbatch.backward_begun:
            microbatch.backward_begun = True
            self._advance("B", microbatch.chunk)
            if not microbatch.tapes:  # all its layers keep everything: no tape will say that it is over
                self._pending[microbatch.chunk].remove(microbatch)
        self._backward, self._collectives = (layer, microbatch), 0

    def finished(self, tape: LayerTape) -> None:
        """A tape has been unpacked to its end."""
        for queue in self._pending.values():
            for microbatch in queue:
                if microbatch.tapes.get(tape.plan.layer) is tape:
                    del microbatch.tapes[tape.plan.layer]
                    if microbatch.forward_done and not microbatch.tapes:
                        queue.remove(microbatch)
                    return

    # --- windows -------------------------------------------------------------------------------

    def collective_window(self, group: Any, *, asynchronous: bool) -> Window | None:
        """The window that a collective over ``group``, about to start, opens; None for none.

        ``asynchronous`` tells whether Megatron itself starts it so. Collectives of replays open
        none: what they wait for is not idle time that was planned.
        """
        if self._replaying or group is not self.group:
            return None
        if isinstance(self.active, (LayerTape, KeptLayer)):
            region = self.active.region
            return Window("fwd", self.active.layer, region) if region in self.forward_slots else None
        if self._backward is None:
            # Outside the layers only the output layer's backward starts collectives asynchronously.
            return Window("head") if asynchronous and self._next_done() is not None else None
        position, self._collectives = self._collectives, self._collectives + 1
        if position >= len(self.backward_slots):
            return None
        return Window("bwd", self._backward[0], self.backward_slots[position])

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
        for layer, label in due:
            tape = target.tapes.get(layer)
            if tape is not None:
                tape.rebuild_label(label)
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
        for microbatch in self._pending[chunk]:
            if not microbatch.backward_begun:
                return microbatch if microbatch.forward_done else None
        return None

    # --- the tapes' host -----------------------------------------------------------------------

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, collectives are plain and open no windows."""
        self._replaying += 1
        timed = self._where is None  # work in a window is timed as a whole
        start = self.clock.mark() if timed else 0
        try:
            yield
        finally:
            self._replaying -= 1
            self._replay = (start, self.clock.mark() if timed else 0)

    def rebuilt(self, tape: LayerTape, storages: int, size_bytes: int) -> None:
        """A replay gave memory back to ``storages`` storages."""
        self.record.rebuilt(self._where, storages, size_bytes)
        if self._where is None:
            one = self.record.demand[tape.plan.layer]
            one.replays += 1
            self.clock.span(*self._replay, one.took)


def _kept_layers(plan: StagePlan, tapes: dict[int, TapePlan]) -> set[int]:
    """Layers of which nothing is dropped, their input and the end of the layer included."""
    return {layer.layer for layer in plan.layers if not layer.dropped and not tapes[layer.layer].dropped}


def _tape_plans(plan: StagePlan, draws: frozenset[str], communicates: frozenset[str]) -> dict[int, TapePlan]:
    """What each layer's tape must know.

    Where a layer's input is dropped, the end of the layer before it has to run again: its
    bias-dropout-add and what that reads count as dropped.
    """
    found = {}
    for ids in plan.chunks:
        for layer, following in zip(ids, (*ids[1:], None), strict=True):
            dropped = plan.layer(layer).dropped - {INPUT}
            if following is not None and INPUT in plan.layer(following).dropped:
                dropped |= {"mlp_bda", "linear_fc2"}
            windows = frozenset(n for n, c in plan.layer(layer).choices if isinstance(c, Window))
            found[layer] = TapePlan(
                layer=layer, dropped=dropped, draws=draws, communicates=communicates, windows=windows
            )
    return found
