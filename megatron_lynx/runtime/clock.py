"""Clocks: how long the compute stream spent between two points.

On a CPU the host's clock tells. On a GPU the host runs ahead of it, and only events on the stream
tell; ``DeviceClock`` reads them at the end of a step, all at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Add = Callable[[int], None]
"""Takes nanoseconds."""


class HostClock:
    """The host's own time; on a GPU the time to launch, not to run."""

    name = "host"

    def mark(self) -> Any:
        """A point in time."""
        return time.perf_counter_ns()

    def span(self, start: Any, end: Any, add: Add) -> None:
        """Give the time between two marks to ``add``."""
        add(end - start)

    def settle(self) -> None:
        """Hand out what is outstanding: nothing."""


class DeviceClock(HostClock):
    """Events on the current CUDA stream; two or three for a window, used again in the next step."""

    name = "device"

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event, Add]] = []

    def mark(self) -> Any:
        """A point on the current stream."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def span(self, start: Any, end: Any, add: Add) -> None:
        """Remember two marks until ``settle``."""
        self._spans.append((start, end, add))

    def settle(self) -> None:
        """Wait for the device and hand out all times."""
        if self._used:
            self._events[self._used - 1].synchronize()
        for start, end, add in self._spans:
            add(round(start.elapsed_time(end) * 1e6))
        self._spans.clear()
        self._used = 0


def clock_for(device: torch.device) -> HostClock:
    """The clock that tells the truth about ``device``."""
    return DeviceClock() if device.type == "cuda" else HostClock()
