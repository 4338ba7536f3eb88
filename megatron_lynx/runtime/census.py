"""Census: counts the bytes that a layer keeps from its forward to its backward, as it really runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_lynx.runtime.region import flatten, is_weight
from megatron_lynx.runtime.storage import Known
from megatron_lynx.runtime.tape import LayerTape


class Census:
    """Watches one forward pass under a tape.

    What autograd keeps is counted by storage, and what the runs of dropped parts hold to run again;
    weights, and what comes from outside the layer beside its input, are not the layer's.
    """

    def __init__(self, tape: LayerTape) -> None:
        self._tape = tape
        self._sizes: dict[int, int] = {}
        self._outside: set[int] = set()

    def counting(
        self, forward: Callable[[], Any], hidden: torch.Tensor, others: Any, carried: Known | None
    ) -> tuple[Any, Known | None]:
        """``LayerTape.run``, and the count in ``tape.kept_bytes``."""
        tape = self._tape
        self._outside = {t.untyped_storage()._cdata for t in flatten(others)}
        tape.kept = self.note
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                return tape.run(forward, hidden, others, carried)
        finally:
            tape.kept = None
            tape.kept_bytes = sum(self._sizes.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.note(tensor)
        return tensor

    def note(self, tensor: torch.Tensor) -> None:
        """``tensor`` stays until the backward."""
        if type(tensor) is torch.Tensor and not is_weight(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._outside:
                self._sizes[storage._cdata] = storage.nbytes()
