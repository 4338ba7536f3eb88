"""Measures what a model's own layer, ends and links cost, on the ranks that will train it.

Runs once before the first step: on the first layer of the model, on the embedding and the head
where this rank has them, and on the process groups that training uses. Random state is put back, no
gradient is accumulated, so training goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.integration.agree import gathered
from megatron_lynx.integration.binding import (
    bind_everything,
    layers_of,
    slots_of,
    transformer_layers,
    weight_of,
)
from megatron_lynx.integration.describe import device_of
from megatron_lynx.integration.install import watching
from megatron_lynx.integration.measuring.ends import ends_ns, layer_arguments
from megatron_lynx.integration.measuring.silence import silent_collectives
from megatron_lynx.integration.measuring.undisturbed import undisturbed
from megatron_lynx.layers import kind_of
from megatron_lynx.layers.kind import LayerKind
from megatron_lynx.profiler.measure import (
    REPEATS,
    WARMUP,
    RegionTimer,
    all_reduce_ns,
    gather_ns,
    median_ns,
    side_by_side,
    timed,
    transfer_ns,
    wgrad_ns,
)
from megatron_lynx.spec import Batch, Model, Parallel, layer_facts
from megatron_lynx.units import format_ns

Times = dict[str, int]


class Probe:
    """Stands where an executor stands, and lets layers run as they are."""

    def __init__(self) -> None:
        self.active: Any = None

    def run_layer(self, _: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)


def measure(chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch) -> CostTable:
    """The cost table of this rank; without a layer on it, the layer's times are empty.

    Every rank must call it, since collectives and transfers run.
    """
    with undisturbed(chunks):
        kind = kind_of(model)
        costs, source = _layer_costs(chunks, kind, model, parallel, batch)
        ends = ends_ns(chunks, model, parallel, batch)
        if parallel.tp > 1 and not parallel.sequence_parallel and costs.collective_ns:
            reduction = costs.collective_ns[f"bwd:{kind.backward_slots(parallel)[0]}"]
            ends["head_window_ns"] = _head_window_ns(chunks, costs, reduction, parallel.tokens(batch))
        p2p = _transfer(chunks, model, parallel, batch)
    table = CostTable(
        layer=costs,
        p2p_ns=p2p,
        graph=kind.graph(model, parallel, batch).fingerprint(),
        job=layer_facts(model, parallel, batch),
        source=source,
    )
    return table.with_times(ends)


def _layer_costs(
    chunks: Sequence[Any], kind: LayerKind, model: Model, parallel: Parallel, batch: Batch
) -> tuple[LayerCosts, str]:
    """Times of this rank's first layer, and where they come from; none at all where it has no layer, and so
    nothing to rebuild."""
    if not any(transformer_layers(chunks)):
        for _ in range(2 * (WARMUP + REPEATS)):  # those with layers measure in step
            torch.distributed.barrier()
        return LayerCosts(forward_ns={}, dgrad_ns={}, wgrad_ns={}), "no layer here"
    run = LayerRun(chunks, model, parallel, batch)
    collectives, contention = _collectives(run, kind, model, parallel, batch)
    with silent_collectives(run.layer.tp_group):
        forward, dgrad, wgrad = _regions(run, kind, model, parallel.tokens(batch))
    alone = LayerCosts(
        forward_ns=forward,
        dgrad_ns=dgrad,
        wgrad_ns=wgrad,
        collective_ns=collectives,
        beside=tuple(sorted(kind.beside)),
        contention=contention,
    )
    whole = run.whole_ns()
    source = "measured on one layer" + beyond_belief(alone, *whole)
    return _accumulating(run.layer, kind, in_step(alone, *whole)), source


def agreed(table: CostTable) -> CostTable:
    """One table for all ranks: a layer's compute is that of the slowest rank, since the others wait for
    it (the slowest as a whole: the slowest of each region would add all ranks' noise up); a collective
    or transfer is the fastest rank's measure, since a slow one includes waiting."""
    tables = gathered(table)
    layers = [one.layer for one in tables if one.layer.forward_ns]  # a stage may have none
    slowest = max(layers, key=_compute_ns)
    slots = slowest.collective_ns
    layer = replace(
        slowest,
        collective_ns={slot: min(one.collective_ns[slot] for one in layers) for slot in slots},
        contention=statistics.median(one.contention for one in layers),
    )
    places = ("embedding_forward_ns", "embedding_backward_ns", "head_forward_ns", "head_backward_ns")
    ends = {name: max(getattr(one, name) for one in tables) for name in places}
    window = min((t for one in tables if (t := one.head_window_ns)), default=0)
    p2p = min((t for one in tables if (t := one.p2p_ns)), default=0)
    source = next(one.source for one in tables if one.layer is slowest)
    return replace(table, layer=layer, head_window_ns=window, p2p_ns=p2p, source=source, **ends)


def _compute_ns(layer: LayerCosts) -> int:
    """A layer's compute, forward and backward."""
    return sum(sum(times.values()) for times in (layer.forward_ns, layer.dgrad_ns, layer.wgrad_ns))


# --- the layer's compute -------------------------------------------------------------------------


def _trained(layer: Any) -> int:
    """How many of a layer's parameters train."""
    return sum(p.numel() for p in layer.parameters() if p.requires_grad)


def _hidden_size(model: Model, parallel: Parallel, batch: Batch) -> tuple[int, int, int]:
    """The shape of the tensor that a rank passes from layer to layer: [rows, b, h]."""
    rows = batch.seq_length // parallel.cp // (parallel.tp if parallel.sequence_parallel else 1)
    return rows, batch.micro_batch_size, model.hidden_size


_CACHES_BYTES = 1 << 28
"""More than a core or a GPU can cache."""


class LayerRun:
    """The first layer of those that train most, on an input of its own, as often as it is asked to; no
    gradient is kept."""

    def __init__(self, chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch) -> None:
        layer = max(layers_of(chunks), key=_trained)
        weight = weight_of(layer, next(iter(kind_of(model).gemms().values())))
        size = _hidden_size(model, parallel, batch)
        self.chunks, self.layer, self.weight = chunks, layer, weight
        self.hidden = torch.randn(size, dtype=weight.dtype, device=weight.device, requires_grad=True)
        self._grad = torch.randn(size, dtype=weight.dtype, device=weight.device)
        self.arguments = layer_arguments(chunks, model, batch, weight.device)
        self._wanted = [self.hidden, *(p for p in layer.parameters() if p.requires_grad)]

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Inside, the layer is in training mode."""
        before = self.layer.training
        self.layer.train()
        try:
            yield
        finally:
            self.layer.train(before)

    @contextlib.contextmanager
    def probed(self) -> Iterator[Probe]:
        """Inside, the layer is in training mode, and its submodules answer to what the probe's ``active``
        is set to."""
        probe = Probe()
        undo = bind_everything(self.chunks, probe)
        try:
            with self.training(), watching(probe):
                yield probe
        finally:
            undo()

    def forward(self) -> Any:
        """The layer's output."""
        return self.layer(hidden_states=self.hidden, **self.arguments)[0]

    def backward(self, out: Any) -> None:
        """The gradients of the layer's input and of its parameters."""
        torch.autograd.grad(out, self._wanted, self._grad, allow_unused=True)

    def whole_ns(self) -> tuple[int, int]:
        """A forward and a backward as training runs them: collectives included, in step with the other
        ranks, and out of the caches, where the layers between have been.

        Means, not medians: a step is the sum of many layers, stalls of the machine included.
        """
        between = torch.ones(_CACHES_BYTES // 4, device=self.hidden.device)

        def before() -> None:
            between.mul_(1)
            torch.distributed.barrier()

        forward, backward = [], []
        with self.training():
            for _ in range(WARMUP + REPEATS):
                out, time_ns = timed(self.forward, before)
                forward.append(time_ns)
                backward.append(timed(partial(self.backward, out), before)[1])
        return round(statistics.mean(forward[WARMUP:])), round(statistics.mean(backward[WARMUP:]))


def _regions(run: LayerRun, kind: LayerKind, model: Model, tokens: int) -> tuple[Times, Times, Times]:
    """Times of each region, collectives left out: forward, backward without weight gradients, and
    weight gradients."""
    timer = RegionTimer(kind.glue_before())
    with run.probed() as probe:
        for _ in range(WARMUP + REPEATS):
            probe.active = timer
            out = run.forward()
            probe.active = None
            run.backward(out)
            timer.end_backward()
    forward, backward = timer.forward_ns(), timer.backward_ns(WARMUP + REPEATS)
    wgrad = {}
    for name, path in kind.gemms().items():
        weight, biased = weight_of(run.layer, path), _adds_bias(run.layer.get_submodule(path))
        wgrad[name] = min(wgrad_ns(tokens, weight, biased), backward[name]) if weight.requires_grad else 0
        backward[name] -= wgrad[name]
    if model.hidden_dropout:
        masks = kind.masks()
        forward |= {mask: _mask_ns(run.hidden, model.hidden_dropout) for mask in masks.values()}
        for region, mask in masks.items():
            forward[region] = max(0, forward[region] - forward[mask])
    return forward, backward, wgrad


def _adds_bias(linear: Any) -> bool:
    """Whether a linear adds its bias itself, and so sums the gradient of it. (Transformer Engine's has an
    empty bias where there is none, and another name for leaving it to the caller.)"""
    bias = getattr(linear, "bias", None)
    left = getattr(linear, "skip_bias_add", False) or getattr(linear, "te_return_bias", False)
    return bias is not None and bias.numel() > 0 and not left


FASTEST, SLOWEST = 0.25, 4.0
"""Between these a layer's pace is believed; beyond them a measurement went wrong."""


def in_step(costs: LayerCosts, forward_ns: int, backward_ns: int) -> LayerCosts:
    """``costs`` at the pace at which the whole layer takes ``forward_ns`` and ``backward_ns``.

    Regions timed alone miss what they cost together: ranks wait for whichever is slower at each
    collective, caches are cold, a device that works ahead of its host hides what starting work costs.
    """
    forward = _pace(lambda pace: costs.at_pace(pace, pace).layer_forward_ns, forward_ns)
    backward = _pace(lambda pace: costs.at_pace(pace, pace).layer_backward_ns, backward_ns)
    return costs.at_pace(forward, backward)


def beyond_belief(costs: LayerCosts, forward_ns: int, backward_ns: int) -> str:
    """What ``in_step`` did not take as it was measured, in words; empty if there is nothing."""
    told = []
    for name, alone_ns, whole_ns in (
        ("forward", costs.layer_forward_ns, forward_ns),
        ("backward", costs.layer_backward_ns, backward_ns),
    ):
        low, high = (getattr(costs.at_pace(p, p), f"layer_{name}_ns") for p in (FASTEST, SLOWEST))
        if not low <= whole_ns <= high:
            taken = FASTEST if whole_ns < low else SLOWEST
            told.append(
                f"; a {name} took {format_ns(whole_ns)} as a whole and {format_ns(alone_ns)} in parts: "
                f"{taken:g} times its parts is believed"
            )
    return "".join(told)


def _pace(time_ns: Callable[[float], int], wanted_ns: int) -> float:
    """The factor at which ``time_ns``, which grows with it, is ``wanted_ns``."""
    paces = range(round(FASTEST * 1000), round(SLOWEST * 1000))
    found = bisect_left(paces, wanted_ns, key=lambda pace: time_ns(pace / 1000))
    return (paces.start + found) / 1000


def _accumulating(layer: Any, kind: LayerKind, costs: LayerCosts) -> LayerCosts:
    """``costs`` with what training adds to a linear's backward: its gradient goes on top of those of the
    microbatches before."""
    dgrad = dict(costs.dgrad_ns)
    for name, path in kind.gemms().items():
        weight = weight_of(layer, path)
        dgrad[name] += _accumulate_ns(weight) if weight.requires_grad else 0
    return replace(costs, dgrad_ns=dgrad)


def _accumulate_ns(weight: torch.Tensor) -> int:
    """Adding a weight's gradient to what the microbatches before left: in fp32, by Megatron."""
    total = torch.zeros_like(weight, dtype=torch.float32)
    gradient = torch.zeros_like(weight)
    return median_ns(lambda: total.add_(gradient))


def _mask_ns(like: torch.Tensor, p: float) -> int:
    """Drawing a dropout mask."""
    inputs = torch.zeros_like(like, requires_grad=True)
    return median_ns(lambda: torch.nn.functional.dropout(inputs, p, training=True))


# --- the links -----------------------------------------------------------------------------------


def _collectives(
    run: LayerRun, kind: LayerKind, model: Model, parallel: Parallel, batch: Batch
) -> tuple[Times, float]:
    """Times of the layer's collectives by slot (``LayerKind``), and the contention.

    In a backward slot a GEMM always runs beside the collective: those are timed that way.
    """
    if parallel.tp == 1:
        return {}, 1.0
    group = run.layer.tp_group
    weight = run.weight
    size = (batch.seq_length // parallel.cp, batch.micro_batch_size, model.hidden_size)
    tensor = torch.zeros(size, dtype=weight.dtype, device=weight.device)
    rows = torch.randn(size[0], model.hidden_size, dtype=weight.dtype, device=weight.device)

    def gemm() -> None:
        with torch.no_grad():
            rows.matmul(weight.t())

    def beside(launch: Callable[[], Any], alone_ns: int) -> tuple[float, int]:
        return side_by_side(launch, gemm, alone_ns, lambda: torch.distributed.barrier(group=group))

    if not parallel.sequence_parallel:
        reduce_ns = all_reduce_ns(size, weight.dtype, weight.device, group)
        contention, stretched = beside(
            lambda: torch.distributed.all_reduce(tensor, group=group, async_op=True), reduce_ns
        )
        found = {f"fwd:{slot}": reduce_ns for slot in kind.forward_slots(parallel)}
        return found | {f"bwd:{slot}": stretched for slot in kind.backward_slots(parallel)}, contention
    gather, scatter = gather_ns(size, weight.dtype, weight.device, group)
    shard = tensor[: size[0] // parallel.tp].clone()
    contention, slow_gather = beside(
        lambda: torch.distributed.all_gather_into_tensor(tensor, shard, group=group, async_op=True), gather
    )
    more, slow_scatter = beside(
        lambda: torch.distributed.reduce_scatter_tensor(shard, tensor, group=group, async_op=True), scatter
    )
    found = {f"fwd:{s}": gather if s in kind.beside else scatter for s in kind.forward_slots(parallel)}
    backward = {"": gather, "gather": slow_gather, "scatter": slow_scatter}
    found |= {f"bwd:{s}": backward[s.partition(".")[2]] for s in kind.backward_slots(parallel)}
    found |= {f"bwd:{s}": 0 for s in set(kind.backward_slots(parallel)) - set(slots_of(run.layer, parallel))}
    return found, max(contention, more)


def _head_window_ns(chunks: Sequence[Any], costs: LayerCosts, reduction_ns: int, tokens: int) -> int:
    """How long the last stage waits for the reduction of the output layer's input gradient beyond the GEMM
    beside it, which it slows as it does in a layer (``LayerCosts.overlap``)."""
    for chunk in chunks:
        if chunk.post_process:
            weight = chunk.shared_embedding_or_output_weight()
            weight = chunk.output_layer.weight if weight is None else weight
            gemm_ns = wgrad_ns(tokens, weight, bias=False)
            return costs.overlap(gemm_ns, reduction_ns)[2]
    return 0


def _transfer(chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch) -> int:
    """One transfer of activations between neighbouring stages."""
    if parallel.pp == 1:
        return 0
    size = _hidden_size(model, parallel, batch)
    group = parallel_state.get_pipeline_model_parallel_group()
    return transfer_ns(size, get_model_config(chunks[0]).params_dtype, device_of(chunks), group)
