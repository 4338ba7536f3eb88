"""Measures what a layer and the ends need besides what is saved: the working sets, in bytes.

The storage meter watches one forward and backward pass of the layer, collectives left out. What is
subtracted is what the layer's graph says is saved at that moment, so that graph and working sets
together give what the meter will see in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_lynx.cost import CostTable
from megatron_lynx.footprint import phase_workspaces
from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.integration.agree import gathered
from megatron_lynx.integration.binding import transformer_layers
from megatron_lynx.integration.measuring.ends import run_ends
from megatron_lynx.integration.measuring.layer import LayerRun, agreed, measure
from megatron_lynx.integration.measuring.silence import silent_collectives
from megatron_lynx.integration.measuring.traced import kept_otherwise
from megatron_lynx.integration.measuring.undisturbed import undisturbed
from megatron_lynx.layers import kind_of, layer_graph
from megatron_lynx.profiler.measure import mark_tensors
from megatron_lynx.profiler.meter import StorageMeter
from megatron_lynx.spec import Batch, Model, Parallel


class _RegionMeter:
    """Stands where a timer stands: the peak while each region runs forward and backward."""

    def __init__(self, meter: StorageMeter, glue_before: Mapping[str, str]) -> None:
        self.meter, self._glue_before = meter, glue_before
        self.forward: dict[str, int] = {}
        self.backward: dict[str, int] = {}
        self._region = ""
        self.region = ""

    def parent(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        """A parent module runs: nothing to measure."""
        return call(*args, **kwargs)

    def record(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a region and note the peak since the one before ended."""
        glue = self._glue_before.get(name)
        if glue is not None:
            self._take(self.forward, glue)
            args, kwargs = (mark_tensors(value, glue, self.arrived) for value in (args, kwargs))
        outer, self.region = self.region, name
        out = call(*args, **kwargs)
        self.region = outer
        self._take(self.forward, name)
        return mark_tensors(out, name, self.arrived)

    def arrived(self, name: str) -> None:
        """The gradient of a region's output is there: the region before it in time is over."""
        if name != self._region:
            self.end()
            self._region = name

    def end(self) -> None:
        """The region whose backward runs is over."""
        self._take(self.backward, self._region)
        self._region = ""

    def _take(self, into: dict[str, int], name: str) -> None:
        if name:
            into[name] = max(into.get(name, 0), self.meter.peak_bytes)
        self.meter.peak_bytes = self.meter.live_bytes


def working_sets(
    chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch, graph: LayerGraph
) -> dict[str, dict[str, int]]:
    """``forward`` and ``backward``: by region, the peak while it runs beyond what is saved then;
    ``ends``: the peak in the ``embedding`` or ``head`` of this rank."""
    with undisturbed(chunks):
        return _working_sets(chunks, model, parallel, batch, graph)


def _working_sets(
    chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch, graph: LayerGraph
) -> dict[str, dict[str, int]]:
    if not any(transformer_layers(chunks)):
        return {"forward": {}, "backward": {}, "ends": _ends(chunks, model, parallel, batch)}
    run = LayerRun(chunks, model, parallel, batch)
    meter = StorageMeter()
    regions = _RegionMeter(meter, kind_of(model).glue_before())
    with run.probed() as probe, silent_collectives(run.layer.tp_group), meter:
        probe.active = regions
        out = run.forward()
        probe.active = None
        # The product makes autograd itself own the gradient that comes in, as in training.
        loss = (out * 2.0).sum()
        del out
        meter.peak_bytes = meter.live_bytes
        torch.autograd.grad(loss, run.hidden)
        regions.end()
    return {
        "forward": _beyond(regions.forward, graph, saved_after_forward),
        "backward": _beyond(regions.backward, graph, saved_before_backward),
        "ends": _ends(chunks, model, parallel, batch),
    }


def measured_costs(chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch) -> CostTable:
    """Times, workspaces and what a layer keeps, measured on every rank and agreed upon; every rank must call
    it."""
    table = agreed(measure(chunks, model, parallel, batch))
    kept = kept_otherwise(chunks, model, parallel, batch)
    graph = layer_graph(model, parallel, batch).keeping(kept)
    sets = working_sets(chunks, model, parallel, batch, graph)
    return with_workspaces(replace(table, kept_bytes=kept), sets, graph)


def with_workspaces(table: CostTable, sets: Mapping[str, Mapping[str, int]], graph: LayerGraph) -> CostTable:
    """``table`` with the workspace of each phase of a layer's backward: the largest of all ranks."""
    own = phase_workspaces(graph, sets["backward"])
    return replace(table, workspace_bytes=tuple(map(max, zip(*gathered(own), strict=True))))


def _beyond(peaks: Mapping[str, int], graph: LayerGraph, saved: Any) -> dict[str, int]:
    return {name: max(0, peak - saved(graph, name)) for name, peak in peaks.items() if name in graph.names}


def saved_after_forward(graph: LayerGraph, region: str) -> int:
    """Bytes that the regions up to ``region`` have saved; the layer's input does not count."""
    names = graph.names[: graph.names.index(region) + 1]
    return sum(
        s.size_bytes for s in graph.storages if s.saved_by and s.producer in names and s.producer != INPUT
    )


def saved_before_backward(graph: LayerGraph, region: str) -> int:
    """Bytes still saved when the backward of ``region`` begins: what it or an earlier region reads."""
    names = graph.names[: graph.names.index(region) + 1]
    return sum(
        s.size_bytes for s in graph.storages if s.producer != INPUT and any(r in names for r in s.saved_by)
    )


def _ends(chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch) -> dict[str, int]:
    found: dict[str, int] = {}
    for chunk in chunks:
        meter = StorageMeter()
        with meter:
            run_ends(chunk, model, parallel, batch)
        for name, here in (("embedding", chunk.pre_process), ("head", chunk.post_process)):
            if here:
                found[name] = meter.peak_bytes
    return found
