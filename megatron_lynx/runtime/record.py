"""StepRecord: what happened in one step, counted by the executor."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from megatron_lynx.plan import Window


@dataclass(slots=True)
class StepRecord:
    """Counts of one training step on one rank.

    ``rebuilt_storages`` and ``rebuilt_bytes`` are by place: ``fwd``, ``bwd``, ``head``, ``stall``
    or ``demand``. ``kept_bytes`` is what each layer held at the end of a forward pass, input
    included; ``left_bytes`` what
    tapes still held after the step, which is zero unless a backward pass was cut short.
    ``window_work_ns`` is host time spent rebuilding, by window.
    """

    rebuilt_storages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    rebuilt_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    kept_bytes: dict[int, int] = field(default_factory=dict)
    left_bytes: int = 0
    window_work_ns: dict[Window, int] = field(default_factory=lambda: defaultdict(int))

    def rebuilt(self, where: str, layer: int, storages: int, size_bytes: int) -> None:
        """Count one replay."""
        self.rebuilt_storages[where] += storages
        self.rebuilt_bytes[where] += size_bytes

    def worked(self, window: Window, time_ns: int) -> None:
        """Count the host time of work in a window."""
        self.window_work_ns[window] += time_ns
