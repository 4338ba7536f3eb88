"""Compares what one real layer keeps with what its kind describes, before anything is planned.

An option that a description does not know changes what a layer saves, not what it computes: training stays
right, but memory would be planned wrongly. So one forward pass of one layer is watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_lynx.graph import LayerGraph
from megatron_lynx.integration.agree import gathered
from megatron_lynx.integration.binding import kind_of_layer, transformer_layers
from megatron_lynx.integration.measuring.layer import LayerRun
from megatron_lynx.integration.measuring.undisturbed import undisturbed
from megatron_lynx.layers import layer_graph
from megatron_lynx.runtime.rng import RandomSource
from megatron_lynx.runtime.trace import Tracer
from megatron_lynx.spec import Batch, Model, Parallel
from megatron_lynx.units import format_bytes


def kept_otherwise(chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch) -> dict[str, int]:
    """By region of a layer, the bytes that it really keeps for a microbatch, where they are not those that
    are described; the largest of all ranks. Every rank must call it."""
    own: dict[str, int] = {}
    if any(transformer_layers(chunks)):
        real = traced(chunks, model, parallel, batch).kept_by_region()
        described = layer_graph(model, parallel, batch).kept_by_region()
        names = {**described, **real}
        own = {n: real.get(n, 0) for n in names if real.get(n, 0) != described.get(n, 0)}
    found: dict[str, int] = {}
    for one in gathered(own):
        for name, size in one.items():
            found[name] = max(size, found.get(name, 0))
    return found


def traced(chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch) -> LayerGraph:
    """The graph of the layer that this rank measures (``LayerRun``), as it really runs; the ranks of its
    tensor-parallel group must call it together."""
    with undisturbed(chunks):
        run = LayerRun(chunks, model, parallel, batch)
        kind = kind_of_layer(run.layer)
        tracer = Tracer(kind, RandomSource(get_cuda_rng_tracker, run.hidden.device))
        with run.probed() as probe:
            probe.active = tracer
            tracer.watch(run.forward, run.hidden, run.arguments)
            probe.active = None
    return tracer.graph(frozenset(kind.forward_slots(parallel)))


def said(kept: Mapping[str, int], graph: LayerGraph, *, strange: bool) -> str:
    """One line on what differs from ``graph``, the description; ``strange`` says that no frozen weight and
    nothing that is known to be unknown explains it."""
    described = graph.kept_by_region()
    each = [
        f"{name} {format_bytes(size)} (described: {format_bytes(described.get(name, 0))})"
        for name, size in sorted(kept.items())
    ]
    return (
        f"a layer keeps other bytes a microbatch than its kind describes: {', '.join(each)}. `lynx profile`, "
        "and a plan made as a run begins, count what was found"
        + ("; please report the layer's configuration" if strange else "")
    )
