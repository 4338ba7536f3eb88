"""StageProblem: everything a planner may know about one pipeline rank.

The rules of the problem (which window serves whom, what is alive when) are those of the design:
forward windows of the forward pass just before the backward, then the stall, then the backward
windows in execution order (last layer first), then on demand.

A stage with several model chunks runs the backward of one chunk at a time, with the windows just
before it; what is rebuilt for it is gone before another chunk has its turn.

Memory is counted at *points*, in this order: each forward window, the end of the forward pass, the
stall, the head, and the phases of the backward of each layer of the chunk (last layer first); for each
moment at which most may be alive (``schedule.Turn``). A backward window belongs to the phase that it
interrupts. At a point are alive:

- what is kept, once per microbatch alive at that moment; once less from the phase on with which it was
  released in its own layer's backward (``LayerGraph.release_phase``);
- what was rebuilt, from the point of its window (or, on demand, the phase in which it is first needed)
  to its release if some backward reads it, else to the point where the last dropped region that reads
  it is rebuilt;
- in a backward, the workspace of the phase;
- from the end of the forward pass until the first backward, in the turn of the last chunk, what the
  output layer and the loss take (``head_bytes``, on the last stage).

After the last backward of the first chunk comes one more point, the backward of the embedding
(``embedding_bytes``, on the first stage), and after all the optimizer's step (``step_bytes``), when no
activation is alive.

On demand a region runs again when a backward or another region on demand first needs it; one that
nobody needs (the end of a layer in Megatron's full recompute) when its layer's backward begins, and
with it what it reads. A dropped input is made at that moment too, by the layer before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from megatron_lynx.cost import LayerCosts
from megatron_lynx.graph import LayerGraph
from megatron_lynx.plan import Window
from megatron_lynx.schedule import Turn

LEAST_WINDOW = 0.005
"""A window of a collective counts from this share of a layer's time on. In a shorter one next to
nothing can be hidden, and what is started there still shares the device with a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """One pipeline rank with identical layers.

    ``chunks`` are the global layer indices of each model chunk (one chunk without VPP), ``turns`` how
    the backward passes of each chunk come: what is alive then, and which windows come before.
    ``budget_bytes`` is what activations and moments may take: device memory less weights, gradients,
    optimizer, buffers and the reserve. ``stall_ns`` is the idle time before a backward in the steady
    state; ``has_stall`` tells that there is a stall also where that is 0: one before the first backward
    and in the cooldown (see ``fill``). ``head_ns`` is the output layer's collective (last stage only).
    ``workspace_bytes`` is what each phase of a layer's backward needs besides saved storages; what is
    not said is nothing. ``recompute_modules`` are the regions that Megatron's own flag of that name runs
    again. ``head_bytes``, ``embedding_bytes`` and ``step_bytes`` are alive at those moments only.
    """

    stage: int
    chunks: tuple[tuple[int, ...], ...]
    graph: LayerGraph
    costs: LayerCosts
    turns: tuple[Turn, ...]
    budget_bytes: int
    forward_slots: tuple[str, ...] = ()
    backward_slots: tuple[str, ...] = ()
    stall_ns: int = 0
    has_stall: bool = False
    head_ns: int = 0
    workspace_bytes: tuple[int, ...] = ()
    head_bytes: int = 0
    embedding_bytes: int = 0
    step_bytes: int = 0
    recompute_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    _rooms: dict[tuple[str, str], int] = field(init=False, repr=False, compare=False)
    """Length of each window, which is the same for every layer."""

    def __post_init__(self) -> None:
        layer = [Window("fwd", 0, s) for s in self.forward_slots]
        layer += [Window("bwd", 0, s) for s in self.backward_slots]
        least = LEAST_WINDOW * (self.costs.layer_forward_ns + self.costs.layer_backward_ns)
        lengths = [(w, self.costs.window_ns(w)) for w in layer]
        rooms: dict[tuple[str, str], int] = {(w.kind, w.slot): ns * (ns >= least) for w, ns in lengths}
        rooms |= {("stall", ""): self.stall_ns, ("head", ""): self.head_ns}
        object.__setattr__(self, "_rooms", rooms)

    @property
    def layers(self) -> tuple[int, ...]:
        """Global indices of all layers of this rank, chunk by chunk."""
        return tuple(layer for chunk in self.chunks for layer in chunk)

    def most_layers(self, chunk: int | None = None) -> int:
        """The most layers, each counted once per microbatch alive, at any moment (of ``chunk``'s turn)."""
        turns = self.turns if chunk is None else self.turns[chunk : chunk + 1]
        counts = [len(layers) for layers in self.chunks]
        alive = [moment for turn in turns for moment in turn.moments]
        return max((sum(n * c for n, c in zip(m, counts, strict=True)) for m in alive), default=0)

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

    def ending(self, chunk: int) -> int:
        """Bytes that the head takes between the forward pass of ``chunk`` and its backward."""
        return self.head_bytes if chunk == len(self.chunks) - 1 else 0

    def beginning(self, chunk: int) -> int:
        """Bytes that the backward of the embedding takes, after those of the layers of ``chunk``."""
        return self.embedding_bytes if chunk == 0 else 0

    def phase_of(self, window: Window) -> int:
        """The phase of its layer's backward that a ``bwd`` window interrupts."""
        return self.graph.phase_of(window.slot.partition(".")[0])

    def chunk_of(self, layer: int) -> int:
        """The model chunk that holds global layer ``layer``; ``KeyError`` if none does."""
        for number, chunk in enumerate(self.chunks):
            if layer in chunk:
                return number
        raise KeyError(layer)

    def windows(self, chunk: int) -> tuple[Window, ...]:
        """Every window in the order in which it serves one backward pass of ``chunk``."""
        found: list[Window] = []
        if self.turns[chunk].served:
            found += [Window("fwd", k, slot) for k in self.chunks[chunk] for slot in self.forward_slots]
        if (self.stall_ns or self.has_stall) and self.turns[chunk].waits:
            found.append(Window("stall"))
        if self.head_ns and chunk == len(self.chunks) - 1:
            found.append(Window("head"))
        for layer in reversed(self.chunks[chunk]):
            found += [Window("bwd", layer, slot) for slot in self.backward_slots]
        return tuple(found)

    def capacity_ns(self, window: Window) -> int:
        """Time that work in ``window`` may take without delaying anything; 0 if it is too short to count."""
        return self._rooms[window.kind, window.slot]

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

        All windows serve their own chunk, the head's the last one, and a stall the chunk that waits. A
        backward window also serves its own layer: the regions whose readers all come before the slot's
        in forward order, since their backward is still to come.
        """
        chunk = self.chunk_of(layer)
        if window.kind == "stall":
            return self.turns[chunk].waits
        if window.kind == "head":
            return chunk == len(self.chunks) - 1
        if window.layer not in self.chunks[chunk]:
            return False
        if window.kind == "fwd" or window.layer > layer:
            return self.turns[chunk].served or window.kind == "bwd"
        slot = window.slot.partition(".")[0]
        return window.layer == layer and self.last_reader(region) < self.graph.names.index(slot)
