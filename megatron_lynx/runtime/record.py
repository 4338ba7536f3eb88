"""StepRecord: what happened in one step, counted by the executor."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

from megatron_lynx.plan import Window

DEMAND = "demand"


@dataclass(slots=True)
class WindowRecord:
    """All openings of one window in one step.

    ``opened`` counts those with something to rebuild: ``work_ns`` went into it, then the operation
    was waited for during ``wait_ns``. ``empty`` counts the others, whose whole wait is
    ``empty_wait_ns``. ``storages`` and ``size_bytes`` came back to life in it.
    """

    opened: int = 0
    work_ns: int = 0
    wait_ns: int = 0
    empty: int = 0
    empty_wait_ns: int = 0
    storages: int = 0
    size_bytes: int = 0

    def worked(self, time_ns: int) -> None:
        """Count work."""
        self.work_ns += time_ns

    def waited(self, time_ns: int) -> None:
        """Count a wait after work."""
        self.wait_ns += time_ns

    def idled(self, time_ns: int) -> None:
        """Count a wait with nothing to do."""
        self.empty_wait_ns += time_ns


@dataclass(slots=True)
class DemandRecord:
    """What one layer rebuilt on demand, which is to say on the critical path."""

    replays: int = 0
    time_ns: int = 0

    def took(self, time_ns: int) -> None:
        """Count the time of a replay."""
        self.time_ns += time_ns


@dataclass(slots=True)
class StepRecord:
    """Counts of one training step on one rank.

    ``rebuilt_storages`` and ``rebuilt_bytes`` are by place: ``fwd``, ``bwd``, ``head``, ``stall``
    or ``demand``. ``kept_bytes`` is what each layer held at the end of a forward pass, input
    included; ``left_bytes`` what tapes still held after the step, which is zero unless a backward
    pass was cut short. ``windows`` and ``demand`` (by layer) say how long things took, by the
    executor's clock; ``began_ns`` is when the step began, by the host's.
    """

    rebuilt_storages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    rebuilt_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    kept_bytes: dict[int, int] = field(default_factory=dict)
    left_bytes: int = 0
    windows: dict[Window, WindowRecord] = field(default_factory=lambda: defaultdict(WindowRecord))
    demand: dict[int, DemandRecord] = field(default_factory=lambda: defaultdict(DemandRecord))
    began_ns: int = field(default_factory=time.perf_counter_ns)

    def rebuilt(self, place: Window | None, storages: int, size_bytes: int) -> None:
        """Count one replay, in a window or on demand."""
        where = DEMAND if place is None else place.kind
        self.rebuilt_storages[where] += storages
        self.rebuilt_bytes[where] += size_bytes
        if place is not None:
            self.windows[place].storages += storages
            self.windows[place].size_bytes += size_bytes

    @property
    def window_work_ns(self) -> dict[Window, int]:
        """Time spent rebuilding, by window."""
        return {window: one.work_ns for window, one in self.windows.items() if one.work_ns}
