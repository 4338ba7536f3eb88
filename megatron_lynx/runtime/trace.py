"""The graph of a layer as it really runs: traced by a tape that watches one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.layers.local import FORWARD_ORDER
from megatron_lynx.runtime.region import MASK_LABEL
from megatron_lynx.runtime.storage import SavedTensor, TapeStorage
from megatron_lynx.runtime.tape import Host, LayerTape, TapePlan

OUTPUT_LABEL = "mlp_bda"
"""What this region passes on is the next layer's input, and counted there."""


class TracingTape(LayerTape):
    """A tape that drops nothing that matters and remembers who saved and who read each storage."""

    def __init__(self, layer: int, host: Host, communicates: frozenset[str]) -> None:
        everything = frozenset(FORWARD_ORDER)
        super().__init__(TapePlan(layer=layer, dropped=everything, communicates=communicates), host)
        self.saved_by: dict[TapeStorage, list[str]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """As a tape does, and note the region."""
        saver = self.region
        saved = super().pack(tensor)
        if isinstance(saved, SavedTensor):
            savers = self.saved_by.setdefault(saved.storage, [])
            if saver not in savers:
                savers.append(saver)
        return saved


def trace_layer(
    run: Callable[[TracingTape], torch.Tensor],
    hidden: torch.Tensor,
    others: Any,
    *,
    host: Host,
    communicates: frozenset[str] = frozenset(),
    draws: frozenset[str] = frozenset(),
) -> LayerGraph:
    """Run a layer's forward once and return its graph.

    Args:
        run: runs the layer with ``host.active`` set to the tape that it is given.
        hidden, others: the layer's input and its other arguments.
        host: the executor that the layer is bound to.
        communicates, draws: regions that issue collectives, and that use random state.
    """
    tape = TracingTape(0, host, communicates)
    tape.begin(hidden, others, None)
    with torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack):
        tape.end(run(tape))
    return _graph(tape, communicates, draws)


def _graph(tape: TracingTape, communicates: frozenset[str], draws: frozenset[str]) -> LayerGraph:
    names: dict[TapeStorage, str] = {}
    storages = []
    for storage in tape.storages:
        if storage.label == OUTPUT_LABEL:
            continue
        names[storage] = f"{storage.label}.{len(names)}"
        storages.append(
            Storage(
                name=names[storage],
                producer=storage.label,
                size_bytes=storage.size_bytes,
                saved_by=tuple(tape.saved_by.get(storage, ())),
            )
        )
    masks = {label for label in MASK_LABEL.values() if any(s.producer == label for s in storages)}
    present = {INPUT, *tape.runs, *masks}
    regions = [
        Region(
            name=name,
            reads=() if name not in tape.runs else tuple(names[s] for s in tape.runs[name].reads),
            communicates=name in communicates or (name == INPUT and bool(communicates)),
            draws=name in draws or name in masks,
        )
        for name in FORWARD_ORDER
        if name in present
    ]
    return LayerGraph(regions=tuple(regions), storages=tuple(storages))
