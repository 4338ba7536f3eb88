"""Functions that run inside ranks: trace real layers, and let tapes count what they keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_lynx.graph import LayerGraph
from megatron_lynx.integration.binding import bind, transformer_layers
from megatron_lynx.integration.session import drawing_regions
from megatron_lynx.layers.local import forward_slots, layer_graph
from megatron_lynx.runtime.executor import Executor
from megatron_lynx.runtime.rng import RandomSource
from megatron_lynx.runtime.trace import TracingTape, trace_layer
from megatron_lynx.spec import Batch, Model
from tests.megatron_cpu.lynx_ranks import Assignment, parallel_of, stage_plan, train_with_plan
from tests.support.small_gpt import LAYERS, MICRO_BATCH, SEQUENCE, VOCABULARY, train_small_gpt


class _TracedError(Exception):
    """Ends the training once a layer has been traced."""


def model_of(options: dict[str, Any], config: Any) -> Model:
    """The Model that describes what ``train_small_gpt`` builds from ``options``."""
    return Model(
        num_layers=LAYERS,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        vocab_size=VOCABULARY,
        num_query_groups=config.num_query_groups,
        ffn_hidden_size=config.ffn_hidden_size,
        swiglu=config.gated_linear_unit,
        position_embedding_type="rope" if options.get("rope") else "learned_absolute",
        normalization=config.normalization,
        add_bias_linear=config.add_bias_linear,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
        attention="unfused",
        attention_softmax_in_fp32=config.attention_softmax_in_fp32,
        fused_activation=config.bias_activation_fusion,
        dtype_bytes=2 if config.bf16 else 4,
        device="cpu",
    )


BATCH = Batch(seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH, global_batch_size=MICRO_BATCH)


def both_graphs(
    rank: int, world_size: int, models: list[dict[str, Any]]
) -> list[tuple[LayerGraph, LayerGraph]]:
    """For each model: the graph of its first layer, traced, and the one from its shape alone."""
    found: list[tuple[LayerGraph, LayerGraph]] = []
    for options in models:
        with contextlib.suppress(_TracedError):
            train_small_gpt(steps=1, around=_tracing(options, found), **options)
    return found


def _tracing(options: dict[str, Any], found: list[tuple[LayerGraph, LayerGraph]]) -> Any:
    @contextlib.contextmanager
    def around(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        by_chunk = transformer_layers(chunks)
        config, parallel = by_chunk[0][0].config, parallel_of(options)
        owned = tuple(tuple(layer.layer_number - 1 for layer in layers) for layers in by_chunk)
        executor = Executor(
            stage_plan("none", 0, owned, parallel),
            rng=RandomSource(),
            device=torch.device("cpu"),
            group=None,
            forward_slots=(),
            backward_slots=(),
        )

        def run_layer(_: int, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            def run(tape: TracingTape) -> torch.Tensor:
                executor.active = tape
                try:
                    return forward(*args, **kwargs)[0]
                finally:
                    executor.active = None

            hidden = kwargs["hidden_states"]
            traced = trace_layer(
                run,
                hidden,
                {key: value for key, value in kwargs.items() if value is not hidden},
                host=executor,
                communicates=frozenset(forward_slots(parallel)),
                draws=drawing_regions(config),
            )
            found.append((traced, layer_graph(model_of(options, config), parallel, BATCH)))
            raise _TracedError

        executor.run_layer = run_layer  # type: ignore[method-assign]
        undo = bind(chunks, executor)
        try:
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
        graphs: list[LayerGraph] = []

        @contextlib.contextmanager
        def watch(session: Any, options: dict[str, Any] = options, graphs: Any = graphs) -> Iterator[None]:
            config = session.config
            graphs.append(layer_graph(model_of(options, config), parallel_of(options), BATCH))
            yield

        records = train_with_plan({**options, "keep_gradients": False}, plan, 1, watch, True)["records"]
        found.append(
            [
                (kept, graphs[0].kept_bytes(name for name, choice in plan[layer].items() if choice != "keep"))
                for layer, kept in sorted(records[0].kept_bytes.items())
            ]
        )
    return found
