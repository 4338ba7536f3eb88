"""Measures what a model's own layer and links cost, on the ranks that will train it.

Runs once before the first step, on the first layer of the model. Random state is put back, no
gradient is accumulated, so training goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.gpt import layer_graph
from megatron_lynx.integration.binding import bind, transformer_layers
from megatron_lynx.plan import LayerPlan, StagePlan
from megatron_lynx.profiler.measure import (
    REPEATS,
    WARMUP,
    RegionTimer,
    all_reduce_ns,
    gather_ns,
    linear_ns,
    median_ns,
)
from megatron_lynx.runtime.rng import RandomSource
from megatron_lynx.runtime.tape import GLUES
from megatron_lynx.spec import Batch, Model, Parallel

LINEARS = {
    "linear_qkv": "self_attention.linear_qkv",
    "linear_proj": "self_attention.linear_proj",
    "linear_fc1": "mlp.linear_fc1",
    "linear_fc2": "mlp.linear_fc2",
}


class _Probe:
    """Stands where an executor stands, and lets layers run as they are."""

    def __init__(self, chunks: tuple[tuple[int, ...], ...]) -> None:
        layers = tuple(LayerPlan(layer=layer) for chunk in chunks for layer in chunk)
        self.plan = StagePlan(stage=0, chunks=chunks, layers=layers)
        self.active: RegionTimer | None = None

    def run_layer(self, _: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)


def measure(chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch) -> CostTable:
    """The cost table of this rank.

    Every rank of a tensor-parallel group must call it, since collectives run.
    """
    by_chunk = transformer_layers(chunks)
    layer = next(layer for layers in by_chunk for layer in layers)
    device = next(layer.parameters()).device
    random = RandomSource(get_cuda_rng_tracker, device)
    with random.replaying(random.capture()):
        layer_costs = _layer_costs(chunks, layer, model, parallel, batch)
        head = _head_costs(model, parallel, batch, layer)
    graph = layer_graph(model, parallel, batch)
    return CostTable(layer=layer_costs, graph=graph.fingerprint(), source="measured on one layer", **head)


def _rows(parallel: Parallel, batch: Batch) -> int:
    return batch.seq_length // (parallel.tp if parallel.sequence_parallel else 1)


def _layer_costs(
    chunks: Sequence[Any], layer: Any, model: Model, parallel: Parallel, batch: Batch
) -> LayerCosts:
    collectives = _collectives(layer, model, parallel, batch)
    forward, backward_ns = _run_layer(chunks, layer, model, parallel, batch)
    gemms = {
        name: linear_ns(batch.seq_length * batch.micro_batch_size, layer.get_submodule(path).weight)
        for name, path in LINEARS.items()
    }
    # A region that waits for a collective is timed as its GEMM alone.
    waiting = {name.removeprefix("fwd:") for name in collectives if name.startswith("fwd:")}
    forward |= {name: gemms[name][0] for name in waiting}
    dgrad = {name: times[1] for name, times in gemms.items()}
    wgrad = {name: times[2] for name, times in gemms.items()}
    known = LayerCosts(forward_ns={}, dgrad_ns=dgrad, wgrad_ns=wgrad, collective_ns=collectives)
    # The rest of the backward is shared out over the other regions like the forward.
    others = {name: time for name, time in forward.items() if name not in gemms}
    rest = max(0, backward_ns - known.layer_backward_ns)
    total = max(1, sum(others.values()))
    dgrad |= {name: rest * time // total for name, time in others.items()}
    return LayerCosts(forward_ns=forward, dgrad_ns=dgrad, wgrad_ns=wgrad, collective_ns=collectives)


def _run_layer(
    chunks: Sequence[Any], layer: Any, model: Model, parallel: Parallel, batch: Batch
) -> tuple[dict[str, int], int]:
    """Forward time of each region, and the whole backward, collectives included."""
    by_chunk = transformer_layers(chunks)
    probe = _Probe(tuple(tuple(one.layer_number - 1 for one in layers) for layers in by_chunk))
    weight = layer.self_attention.linear_qkv.weight
    size = (_rows(parallel, batch), batch.micro_batch_size, model.hidden_size)
    hidden = torch.randn(size, dtype=weight.dtype, device=weight.device, requires_grad=True)
    grad = torch.ones(size, dtype=weight.dtype, device=weight.device)
    arguments = _layer_arguments(chunks, model, batch, weight.device)
    timer = RegionTimer({glue.sink: glue.name for glue in GLUES})
    undo = bind(chunks, probe)  # type: ignore[arg-type]
    trained = layer.training
    layer.train()
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        probe.active = timer
        outputs[:] = [layer(hidden_states=hidden, **arguments)[0]]
        probe.active = None

    try:
        backward_ns = median_ns(
            lambda: torch.autograd.grad(outputs.pop(), hidden, grad), before=forward, repeats=REPEATS
        )
    finally:
        undo()
        layer.train(trained)
    times = timer.medians_ns(WARMUP)
    masks = {"self_attn_bda": "self_attn_dropout", "mlp_bda": "mlp_dropout"}
    if model.hidden_dropout:
        times |= {mask: times[name] for name, mask in masks.items()}
    return times, backward_ns


def _layer_arguments(
    chunks: Sequence[Any], model: Model, batch: Batch, device: torch.device
) -> dict[str, Any]:
    """What the model passes to its layers beside the input: the causal mask, rotary embeddings."""
    s = batch.seq_length
    mask = None
    if model.mask_from_data:
        mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1)
    found: dict[str, Any] = {"attention_mask": mask}
    if model.position_embedding_type == "rope":
        rotary = next(m.rotary_pos_emb for c in chunks for m in c.modules() if hasattr(m, "rotary_pos_emb"))
        found["rotary_pos_emb"] = rotary(s)
    return found


def _collectives(layer: Any, model: Model, parallel: Parallel, batch: Batch) -> dict[str, int]:
    """Times of the layer's collectives by slot (``gpt.forward_slots``, ``gpt.backward_slots``)."""
    if parallel.tp == 1:
        return {}
    group = layer.self_attention.linear_proj.tp_group
    weight = layer.self_attention.linear_qkv.weight
    size = (batch.seq_length, batch.micro_batch_size, model.hidden_size)
    if not parallel.sequence_parallel:
        reduce_ns = all_reduce_ns(size, weight.dtype, weight.device, group)
        return dict.fromkeys(
            ("fwd:linear_proj", "fwd:linear_fc2", "bwd:linear_fc1", "bwd:linear_qkv"), reduce_ns
        )
    gather, scatter = gather_ns(size, weight.dtype, weight.device, group)
    found: dict[str, int] = {}
    for column, row in (("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")):
        found |= {f"fwd:{column}": gather, f"fwd:{row}": scatter, f"bwd:{row}": gather}
        found |= {f"bwd:{column}.gather": gather, f"bwd:{column}.scatter": scatter}
    return found


def _head_costs(model: Model, parallel: Parallel, batch: Batch, layer: Any) -> dict[str, int]:
    """The output layer's GEMMs, by shape, so that every rank knows them; and the wait for the
    reduction of its input gradient."""
    weight = layer.self_attention.linear_qkv.weight
    rows = batch.seq_length * batch.micro_batch_size
    head = torch.empty(
        model.vocab_size // parallel.tp, model.hidden_size, dtype=weight.dtype, device=weight.device
    )
    forward, dgrad, wgrad = linear_ns(rows, head)
    found = {"head_forward_ns": forward, "head_backward_ns": dgrad + wgrad}
    if parallel.tp > 1 and not parallel.sequence_parallel:
        size = (batch.seq_length, batch.micro_batch_size, model.hidden_size)
        wait = all_reduce_ns(size, weight.dtype, weight.device, layer.self_attention.linear_proj.tp_group)
        found["head_window_ns"] = max(0, wait - wgrad)
    return found
