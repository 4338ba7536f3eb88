"""What happens inside one pass of a microbatch: pieces of time and changes of memory.

A ``Pass`` is a template: all microbatches that run under the same circumstances share it. Offsets
are nanoseconds from the start of the pass; sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

COMPUTE: Final = "compute"
TENSOR_LINK: Final = "tp"
PIPELINE_LINK: Final = "p2p"
STREAMS: Final = (COMPUTE, TENSOR_LINK, PIPELINE_LINK)
"""A rank's streams: its kernels, its tensor-parallel link, its pipeline link."""

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
HIDDEN: Final = "recompute-hidden"
EXPOSED: Final = "recompute-exposed"
STALL: Final = "recompute-stall"
WAIT: Final = "wait"
IDLE: Final = "idle"
COLLECTIVE: Final = "collective"
P2P: Final = "p2p"
KINDS: Final = (FORWARD, BACKWARD, HIDDEN, STALL, EXPOSED, WAIT, IDLE, COLLECTIVE, P2P)
"""What a span can be. On the compute stream: work of a pass; recomputation in a window, in a
stall, or on the critical path; ``wait`` for a tensor-parallel collective with nothing to do;
``idle`` for the pipeline. On the links: a collective, a transfer."""

KEPT: Final = "kept"
IN_FORWARD: Final = "rebuilt in forward windows"
IN_STALL: Final = "rebuilt in the stall"
IN_BACKWARD: Final = "rebuilt in backward windows"
ON_DEMAND: Final = "rebuilt on demand"
WORKSPACE: Final = "backward workspace"
HEAD: Final = "logits and loss"
EMBEDDING: Final = "embedding gradient"
OWNERS: Final = (KEPT, IN_FORWARD, IN_STALL, IN_BACKWARD, ON_DEMAND, WORKSPACE, HEAD, EMBEDDING)
"""Whose the bytes are."""


class Piece(NamedTuple):
    """A stretch of one stream inside a pass; ``layer`` is -1 outside the layers."""

    stream: str
    kind: str
    start_ns: int
    end_ns: int
    layer: int
    name: str


class Delta(NamedTuple):
    """Bytes that appear (or, below zero, are freed) at an offset, and whose they are.

    ``layer`` and ``name`` say where the pass is at that moment.
    """

    at_ns: int
    size_bytes: int
    owner: str
    layer: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass: what it can do before its input arrives (``early``), and the rest (``body``).

    Early work rebuilds activations while the gradient is on its way; offsets of the body count
    from the moment when the early work is done and the input is there.
    """

    early: tuple[Piece, ...] = ()
    body: tuple[Piece, ...] = ()
    early_deltas: tuple[Delta, ...] = ()
    body_deltas: tuple[Delta, ...] = ()
    early_ns: int = 0
    body_ns: int = 0


class Cursor:
    """Writes pieces and deltas one after another on the compute stream."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.pieces: list[Piece] = []
        self.deltas: list[Delta] = []

    def run(self, kind: str, time_ns: int, layer: int, name: str) -> None:
        """Occupy the compute stream; compute of one layer in a row becomes one piece."""
        if time_ns <= 0:
            return
        start, self.now_ns = self.now_ns, self.now_ns + time_ns
        if self.pieces and kind in (FORWARD, BACKWARD):
            last = self.pieces[-1]
            if last.kind == kind and last.layer == layer and last.end_ns == start and layer >= 0:
                self.pieces[-1] = Piece(COMPUTE, kind, last.start_ns, self.now_ns, layer, "")
                return
        self.pieces.append(Piece(COMPUTE, kind, start, self.now_ns, layer, name))

    def collective(self, start_ns: int, time_ns: int, layer: int, name: str) -> None:
        """Occupy the tensor-parallel link."""
        if time_ns > 0:
            self.pieces.append(Piece(TENSOR_LINK, COLLECTIVE, start_ns, start_ns + time_ns, layer, name))

    def memory(self, size_bytes: int, owner: str, layer: int, name: str) -> None:
        """Take bytes, or give them back if ``size_bytes`` is below zero."""
        if size_bytes:
            self.deltas.append(Delta(self.now_ns, size_bytes, owner, layer, name))


class Clock(Cursor):
    """A cursor that only tells the time: for a search, which looks at nothing else."""

    def run(self, kind: str, time_ns: int, layer: int, name: str) -> None:
        """Let time pass."""
        if time_ns > 0:
            self.now_ns += time_ns

    def collective(self, start_ns: int, time_ns: int, layer: int, name: str) -> None:
        """Nothing: a collective delays nobody by itself."""

    def memory(self, size_bytes: int, owner: str, layer: int, name: str) -> None:
        """Nothing."""
