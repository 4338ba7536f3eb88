"""Random state: captured where a region draws, set for a replay, put back afterwards.

This is the only place that touches random state (Rule 5 of ``tape``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Tracker(Protocol):
    """Megatron's tracker of named device random states."""

    def get_states(self) -> dict[str, Any]:
        """A copy of the mapping from name to state."""

    def set_states(self, states: dict[str, Any]) -> None:
        """Replace the mapping; the tracker keeps and later changes the dict that it is given."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """Random state at one moment: of the generators that a source looks after, and of the tracker."""

    host: torch.Tensor | None
    device: torch.Tensor | None
    tracked: Mapping[str, Any]
    fork: str | None

    def same_as(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        pairs = [(self.host, other.host), (self.device, other.device)]
        pairs += [(state, other.tracked.get(name)) for name, state in self.tracked.items()]
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


class RandomSource:
    """Captures and sets random state: torch's own and that of the trackers.

    Args:
        tracker: returns Megatron's tracker, or None where there is none. It is asked every time,
            since Megatron replaces its tracker when it is initialised again.
        device: where the layers run. On CUDA nothing of a layer draws from the host's generator, so
            that is left alone there.
        everything: look after the host's generator on CUDA too.
    """

    def __init__(
        self, tracker: Any = None, device: torch.device | None = None, *, everything: bool = False
    ) -> None:
        self._tracker = tracker
        self._device = device is not None and device.type == "cuda"
        self._host = everything or not self._device

    def capture(self) -> RandomState:
        """The state now; cheap enough for once per region that draws."""
        tracker = self._tracker() if self._tracker else None
        return RandomState(
            host=torch.get_rng_state() if self._host else None,
            device=torch.cuda.get_rng_state() if self._device else None,
            tracked=tracker.get_states() if tracker else {},
            fork=getattr(tracker, "_current_state_name", None),
        )

    def restore(self, state: RandomState) -> None:
        """Make ``state`` current. The tracker gets a copy, so a state can be set again."""
        if state.host is not None:
            torch.set_rng_state(state.host)
        if state.device is not None:
            torch.cuda.set_rng_state(state.device)
        tracker = self._tracker() if self._tracker else None
        if tracker:
            tracker.set_states(dict(state.tracked))
            if state.fork is not None:
                tracker._current_state_name = state.fork

    def exchange(self, state: RandomState) -> RandomState:
        """Make ``state`` current; returns what was."""
        current = self.capture()
        self.restore(state)
        return current

    @contextmanager
    def replaying(self, state: RandomState | None) -> Iterator[None]:
        """Run the body under ``state``, then put back what was current. None: change nothing."""
        if state is None:
            yield
            return
        current = self.exchange(state)
        try:
            yield
        finally:
            self.restore(current)
