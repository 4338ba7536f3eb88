"""StageProblem: everything a planner may know about one pipeline rank.

The rules of the problem (which window serves whom, what is alive when) are those of the design:
forward windows of the forward pass just before the backward, then the stall, then the backward
windows in execution order (last layer first), then on demand.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.cost import LayerCosts
from megatron_lynx.graph import LayerGraph
from megatron_lynx.plan import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """One pipeline rank with identical layers.

    ``chunks`` are the global layer indices of each model chunk (one chunk without VPP).
    ``in_flight`` counts, per chunk, the microbatches whose kept activations are alive at the peak.
    ``budget_bytes`` is what activations may take: device memory less weights, gradients,
    optimizer, logits and the reserve. ``has_forward_windows`` is False where a microbatch's
    backward follows its own forward (the last stage, or no pipeline). ``stall_ns`` is the idle
    time before a backward in the steady state, ``head_ns`` the output layer's collective (last
    stage only). ``workspace_bytes`` is what one layer's backward needs besides saved storages.
    """

    stage: int
    chunks: tuple[tuple[int, ...], ...]
    graph: LayerGraph
    costs: LayerCosts
    in_flight: tuple[int, ...]
    budget_bytes: int
    forward_slots: tuple[str, ...] = ()
    backward_slots: tuple[str, ...] = ()
    has_forward_windows: bool = True
    stall_ns: int = 0
    head_ns: int = 0
    workspace_bytes: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Global indices of all layers of this rank, chunk by chunk."""
        return tuple(layer for chunk in self.chunks for layer in chunk)

    def windows(self) -> tuple[Window, ...]:
        """Every window in the order in which it serves one backward pass."""
        found: list[Window] = []
        for chunk in self.chunks:
            if self.has_forward_windows:
                found += [Window("fwd", k, slot) for k in chunk for slot in self.forward_slots]
        if self.stall_ns:
            found.append(Window("stall"))
        if self.head_ns:
            found.append(Window("head"))
        for chunk in reversed(self.chunks):
            for layer in reversed(chunk):
                found += [Window("bwd", layer, slot) for slot in self.backward_slots]
        return tuple(found)

    def capacity_ns(self, window: Window) -> int:
        """Time that work in ``window`` may take without delaying anything."""
        if window.kind == "stall":
            return self.stall_ns
        if window.kind == "head":
            return self.head_ns
        return self.costs.window_ns(window)
