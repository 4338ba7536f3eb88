"""StageProblem: everything a planner may know about one pipeline rank.

The rules of the problem (which window serves whom, what is alive when) are those of the design:
forward windows of the forward pass just before the backward, then the stall, then the backward
windows in execution order (last layer first), then on demand.

Memory is counted at *points*, in this order: each forward window, the end of the forward pass, the
stall, the head, and the phases of the backward of each layer (last layer first). A backward window
belongs to the phase that it interrupts. At a point are alive:

- what is kept, once per microbatch in flight; once less from the phase on with which it was released
  in its own layer's backward (``LayerGraph.release_phase``);
- what was rebuilt, from the point of its window (or, on demand, the phase in which it is first needed)
  to its release if some backward reads it, else to the point where the last dropped region that reads
  it is rebuilt;
- in a backward, the workspace of the phase.

On demand a region runs again when a backward or another region on demand first needs it; one that
nobody needs (the end of a layer in Megatron's full recompute) when its layer's backward begins, and
with it what it reads. A dropped input is made at that moment too, by the layer before.

With several model chunks a backward of one chunk is not followed at once by that of another, so all
that another chunk holds counts as alive throughout: its in-flight microbatches in full, and what was
rebuilt for it before the backward passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

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
    stage only). ``has_stall`` tells that there is a stall also where ``stall_ns`` is 0: one before
    the first backward and in the cooldown (see ``fill``). ``workspace_bytes`` is what each phase of
    a layer's backward needs besides saved storages; what is not said is nothing.
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
    has_stall: bool = False
    head_ns: int = 0
    workspace_bytes: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """Global indices of all layers of this rank, chunk by chunk."""
        return tuple(layer for chunk in self.chunks for layer in chunk)

    @property
    def backward_order(self) -> tuple[int, ...]:
        """The layers in the order of their backward passes: last chunk first, last layer first."""
        return tuple(layer for chunk in reversed(self.chunks) for layer in reversed(chunk))

    @property
    def phases(self) -> int:
        """Phases of a layer's backward."""
        return len(self.graph.cuts) + 1

    def workspace(self, phase: int) -> int:
        """Bytes that a phase needs besides saved storages."""
        return self.workspace_bytes[phase] if phase < len(self.workspace_bytes) else 0

    def phase_of(self, window: Window) -> int:
        """The phase of its layer's backward that a ``bwd`` window interrupts."""
        return self.graph.phase_of(window.slot.partition(".")[0])

    def chunk_of(self, layer: int) -> int:
        """The model chunk that holds global layer ``layer``; ``KeyError`` if none does."""
        for number, chunk in enumerate(self.chunks):
            if layer in chunk:
                return number
        raise KeyError(layer)

    def windows(self) -> tuple[Window, ...]:
        """Every window in the order in which it serves one backward pass."""
        found: list[Window] = []
        for chunk in self.chunks:
            if self.has_forward_windows:
                found += [Window("fwd", k, slot) for k in chunk for slot in self.forward_slots]
        if self.stall_ns or self.has_stall:
            found.append(Window("stall"))
        if self.head_ns:
            found.append(Window("head"))
        for layer in self.backward_order:
            found += [Window("bwd", layer, slot) for slot in self.backward_slots]
        return tuple(found)

    def capacity_ns(self, window: Window) -> int:
        """Time that work in ``window`` may take without delaying anything."""
        if window.kind == "stall":
            return self.stall_ns
        if window.kind == "head":
            return self.head_ns
        return self.costs.window_ns(window)

    def work_ns(self, region: str, window: Window) -> int:
        """Time that rebuilding ``region`` takes inside ``window``.

        Only in the stall is the device free of a collective, hence of its contention.
        """
        return self.costs.rebuild_ns(region, hidden=window.kind != "stall")

    def excess_ns(self, window: Window, work_ns: int) -> int:
        """What ``work_ns`` of work in ``window`` costs on the critical path: what is left at the end of
        the window runs on at full speed, without the collective's contention."""
        return ceil(max(0, work_ns - self.capacity_ns(window)) / self.slowdown(window.kind))

    def slowdown(self, kind: str) -> float:
        """How much longer work takes in a window of ``kind``: in the stall no collective is beside it."""
        return 1.0 if kind == "stall" else self.costs.contention

    def demand_ns(self, region: str) -> int:
        """Time on the critical path when ``region`` is rebuilt on demand, collective included."""
        wait = self.costs.collective_ns.get(f"fwd:{region}", 0)
        again = wait if self.graph.region(region).communicates else 0
        return self.costs.rebuild_ns(region, hidden=False) + again

    def last_reader(self, region: str) -> int:
        """The position, in forward order, of the first backward that needs ``region``'s storages
        (the backward goes from the last region to the first); -1 if none does."""
        names = self.graph.names
        readers = [names.index(n) for s in self.graph.produced_by(region) for n in s.saved_by]
        return max(readers, default=-1)

    def serves(self, window: Window, layer: int, region: str) -> bool:
        """Whether ``window`` comes before the backward of ``layer`` needs ``region``.

        With several chunks, forward and backward windows serve their own chunk, and the head's
        the last one. A backward window also serves its own layer: the regions whose readers all
        come before the slot's in forward order, since their backward is still to come.
        """
        if window.kind == "stall":
            return True
        if window.kind == "head":
            return self.chunk_of(layer) == len(self.chunks) - 1
        chunk = self.chunk_of(layer)
        if window.layer not in self.chunks[chunk]:
            return False
        if window.kind == "fwd" or window.layer > layer:
            return True
        slot = window.slot.partition(".")[0]
        return window.layer == layer and self.last_reader(region) < self.graph.names.index(slot)
