"""Functions that run inside ranks: trace real layers, and let tapes count what they keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.integration.binding import bind_everything, kind_of_layer, transformer_layers
from megatron_lynx.integration.install import install, watching
from megatron_lynx.runtime.rng import RandomSource
from megatron_lynx.runtime.trace import Tracer
from tests.megatron_cpu.lynx_ranks import (
    Assignment,
    described_graph,
    parallel_of,
    train_with_plan,
)
from tests.support.small_gpt import train_small_gpt


class _TracedError(Exception):
    """Ends the training once a layer has been traced."""


def both_graphs(
    rank: int, world_size: int, models: list[dict[str, Any]]
) -> list[tuple[LayerGraph, LayerGraph]]:
    """For each model: the graph of its first layer, traced, and the one from its shape alone."""
    found: list[tuple[LayerGraph, LayerGraph]] = []
    for options in models:
        with contextlib.suppress(_TracedError):
            train_small_gpt(steps=1, around=_tracing(options, found), **options)
    return found


class _Watcher:
    """Traces the first layer that runs and ends the training there."""

    def __init__(self, trace: Callable[[Any, Any, dict[str, Any]], None]) -> None:
        self.active: Any = None
        self._trace = trace

    def run_layer(self, _: int, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        self._trace(forward, args, kwargs)
        raise _TracedError


def _tracing(options: dict[str, Any], found: list[tuple[LayerGraph, LayerGraph]]) -> Any:
    @contextlib.contextmanager
    def around(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        layer = transformer_layers(chunks)[0][0]
        kind, parallel = kind_of_layer(layer), parallel_of(options)
        described = described_graph(options, chunks)

        def trace(forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
            tracer = Tracer(kind, RandomSource(get_cuda_rng_tracker))
            watcher.active = tracer
            hidden = kwargs["hidden_states"]
            others = {key: value for key, value in kwargs.items() if value is not hidden}
            try:
                tracer.watch(lambda: forward(*args, **kwargs), hidden, others)
            finally:
                watcher.active = None
            talks = {*kind.forward_slots(parallel), *([INPUT] if parallel.tp > 1 else [])}
            talks |= {"core_attention"} if parallel.cp > 1 else set()
            found.append((tracer.graph(frozenset(talks)), described))

        watcher = _Watcher(trace)
        undo = bind_everything(chunks, watcher)
        try:
            with install(), watching(watcher):
                yield lambda schedule: schedule
        finally:
            undo()

    return around


def kept_and_predicted(
    rank: int, world_size: int, cases: list[tuple[dict[str, Any], Assignment]]
) -> list[list[tuple[int, int]]]:
    """For each model and plan: bytes that the tape of each layer kept, and the graph's prediction."""
    found = []
    for options, plan in cases:
        trained = train_with_plan({**options, "keep_gradients": False}, plan, 1, count_kept=True)
        records, graph = trained["records"], trained["graph"]
        found.append(
            [
                (kept, graph.kept_bytes(name for name, choice in plan[layer].items() if choice != "keep"))
                for layer, kept in sorted(records[0].kept_bytes.items())
            ]
        )
    return found
