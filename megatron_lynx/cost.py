"""What running costs: nanoseconds per region, per collective and per transfer.

``LayerCosts`` holds the times of one layer, ``CostTable`` those of a whole job. Both are data:
either estimated from a device's rates (``estimate``) or measured by the profiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_lynx.plan import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Times of one layer for one microbatch on one rank.

    ``forward_ns`` is the compute of each region alone. A region's backward is ``dgrad_ns`` (all
    that is not a weight gradient) plus ``wgrad_ns`` (the weight-gradient GEMM of a linear).
    ``collective_ns`` has one entry per wait: ``fwd:SLOT`` and ``bwd:SLOT``, with the slots of
    ``gpt.forward_slots`` and ``gpt.backward_slots``. ``contention`` multiplies the time of work
    that runs while a collective is on the wire.
    """

    forward_ns: Mapping[str, int]
    dgrad_ns: Mapping[str, int]
    wgrad_ns: Mapping[str, int]
    collective_ns: Mapping[str, int] = field(default_factory=dict)
    contention: float = 1.0

    def backward_ns(self, region: str) -> int:
        """Compute of a region's backward."""
        return self.dgrad_ns.get(region, 0) + self.wgrad_ns.get(region, 0)

    def rebuild_ns(self, region: str, *, hidden: bool) -> int:
        """Compute to run ``region`` again, longer by ``contention`` when it shares the device
        with a collective (``hidden``)."""
        base = self.forward_ns.get(region, 0)
        return round(base * self.contention) if hidden else base

    def window_ns(self, window: Window) -> int:
        """How long the compute stream would wait in a ``fwd`` or ``bwd`` window.

        What Megatron already runs during the collective is taken off: the weight-gradient GEMM
        beside the reduction of an input gradient, the input-gradient GEMM beside a gather of the
        saved input.
        """
        wait = self.collective_ns.get(f"{window.kind}:{window.slot}", 0)
        if window.kind == "fwd":
            return wait
        region, _, part = window.slot.partition(".")
        if part == "gather":
            return max(0, wait - self.dgrad_ns.get(region, 0))
        if part == "scatter" or region in ("linear_qkv", "linear_fc1"):
            return max(0, wait - self.wgrad_ns.get(region, 0))
        return wait

    @property
    def layer_forward_ns(self) -> int:
        """A layer's forward: compute and every collective, none of it overlapped."""
        waits = sum(t for name, t in self.collective_ns.items() if name.startswith("fwd:"))
        return sum(self.forward_ns.values()) + waits

    @property
    def layer_backward_ns(self) -> int:
        """A layer's backward without recomputation: compute and what the GEMMs do not cover."""
        compute = sum(self.dgrad_ns.values()) + sum(self.wgrad_ns.values())
        waits = 0
        for name in self.collective_ns:
            kind, _, slot = name.partition(":")
            if kind == "bwd":
                waits += self.window_ns(Window("bwd", 0, slot))
        return compute + waits
