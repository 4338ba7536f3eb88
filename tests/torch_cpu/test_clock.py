"""Clocks of the runtime: host time at once, device time when the step is settled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lynx.plan import Window
from megatron_lynx.runtime.clock import DeviceClock, HostClock, clock_for
from megatron_lynx.runtime.record import StepRecord


class Stream:
    """Stands in for a CUDA stream: its events happen one millisecond after each other."""

    def __init__(self) -> None:
        self.now_ms, self.made, self.waits = 0, 0, 0

    def event(self, *, enable_timing: bool) -> Any:
        """What ``torch.cuda.Event`` makes."""
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    """An event on a Stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.at_ms = stream, -1

    def record(self) -> None:
        """Happen now."""
        self.stream.now_ms += 1
        self.at_ms = self.stream.now_ms

    def synchronize(self) -> None:
        """Wait for it."""
        self.stream.waits += 1

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from this one to ``other``; only after a wait."""
        assert self.stream.waits
        return float(other.at_ms - self.at_ms)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    return made


def test_host_time_counts_at_once() -> None:
    times: list[int] = []
    clock = HostClock()
    clock.span(clock.mark(), clock.mark(), times.append)
    assert len(times) == 1
    assert times[0] >= 0
    clock.settle()
    assert len(times) == 1


def test_device_time_counts_when_settled_and_events_are_used_again(stream: Stream) -> None:
    clock, times = DeviceClock(), list[int]()
    for step in range(3):
        start, middle, end = (clock.mark() for _ in range(3))
        clock.span(start, middle, times.append)
        clock.span(start, end, times.append)
        assert len(times) == 2 * step
        clock.settle()
        assert times[-2:] == [1_000_000, 2_000_000]
    assert (stream.made, stream.waits) == (3, 3)


def test_a_step_without_windows_waits_for_nothing(stream: Stream) -> None:
    DeviceClock().settle()
    assert stream.waits == 0


def test_each_device_has_its_clock() -> None:
    assert clock_for(torch.device("cpu")).name == "host"
    assert clock_for(torch.device("cuda")).name == "device"


def test_a_record_counts_by_place_and_by_window() -> None:
    record, window = StepRecord(), Window("bwd", 3, "linear_fc1")
    record.rebuilt(window, 2, 100)
    record.rebuilt(window, 1, 10)
    record.rebuilt(None, 4, 1000)
    assert dict(record.rebuilt_storages) == {"bwd": 3, "demand": 4}
    assert dict(record.rebuilt_bytes) == {"bwd": 110, "demand": 1000}
    assert (record.windows[window].storages, record.windows[window].size_bytes) == (3, 110)
    assert record.window_work_ns == {}
    record.windows[window].worked(7)
    assert record.window_work_ns == {window: 7}
