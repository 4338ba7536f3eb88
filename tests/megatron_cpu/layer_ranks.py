"""Functions that run inside ranks: single layers under a session, driven by hand."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config, unwrap_model

from megatron_lynx.errors import ConfigError
from megatron_lynx.graph import LayerGraph
from megatron_lynx.integration.binding import transformer_layers
from megatron_lynx.integration.install import install
from megatron_lynx.integration.measuring import traced
from megatron_lynx.integration.session import Session
from megatron_lynx.layers import layer_graph
from megatron_lynx.runtime.region import RegionRun
from megatron_lynx.spec import Batch
from tests.megatron_cpu.lynx_ranks import (
    EVERYTHING,
    described_graph,
    described_model,
    differences,
    parallel_of,
    stage_plan,
)
from tests.support.small_gpt import MICRO_BATCH, SEQUENCE, train_small_gpt

Check = Callable[[list[Any], dict[str, Any]], list[str]]


def _with_model(model: dict[str, Any], check: Check) -> list[str]:
    """Build a model, run ``check`` on it, train one step for good measure."""
    found: list[str] = []

    @contextlib.contextmanager
    def around(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        found.extend(check(chunks, model))
        yield lambda schedule: schedule

    train_small_gpt(steps=1, around=around, **model)
    return found


@contextlib.contextmanager
def _session(chunks: list[Any], model: dict[str, Any], plan: str) -> Iterator[Session]:
    parallel = parallel_of(model)
    owned = tuple(tuple(layer.layer_number - 1 for layer in ls) for ls in transformer_layers(chunks))
    graph = described_graph(model, chunks)
    with install() as hooks:
        session = Session(hooks, stage_plan(plan, 0, owned, parallel), parallel, chunks, graph)
        yield session
        session.close()


def _hidden(seed: int = 7) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(SEQUENCE, MICRO_BATCH, 32, generator=draws).requires_grad_()


def _input_gradients(layer: Any, positional: bool) -> list[torch.Tensor]:
    """Gradients of the input and of a differentiable rotary embedding, which only comes by keyword."""
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    hidden = _hidden()
    rotary = torch.linspace(0, 1, SEQUENCE * 8).reshape(SEQUENCE, 1, 1, 8).requires_grad_()
    arguments = {"attention_mask": None, "rotary_pos_emb": rotary}
    out = layer(hidden, **arguments) if positional else layer(hidden_states=hidden, **arguments)
    return list(torch.autograd.grad(out[0].square().sum(), [hidden, rotary]))


def keyword_gradients(rank: int, world_size: int, model: dict[str, Any]) -> list[str]:
    """Whether inputs by keyword and by position get stock Megatron's gradients; what differs."""

    def check(chunks: list[Any], model: dict[str, Any]) -> list[str]:
        layer = transformer_layers(chunks)[0][0]
        stock = _input_gradients(layer, positional=True)
        different = []
        for positional in (True, False):
            with _session(chunks, model, "full"):
                ours = _input_gradients(layer, positional)
            if not all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True)):
                different.append(f"gradients, positional={positional}")
        return different

    return _with_model(model, check)


def any_order(rank: int, world_size: int, model: dict[str, Any]) -> list[str]:
    """Three microbatches in flight in the same layers, rebuilt in random order, some twice, and run
    backward in random order: what differs from stock."""

    def check(chunks: list[Any], model: dict[str, Any]) -> list[str]:
        layers = transformer_layers(chunks)[0]
        different = []
        for seed in range(6):
            stock = _three_microbatches(layers, None, seed)
            with _session(chunks, model, "full") as session:
                ours = _three_microbatches(layers, session, seed)
                left = session.executor.open_tapes()
            if not all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True)):
                different.append(f"gradients, order {seed}")
            if left:
                different.append(f"{len(left)} tapes are open, order {seed}")
        return different

    return _with_model(model, check)


def _three_microbatches(layers: list[Any], session: Session | None, seed: int) -> list[torch.Tensor]:
    draw = random.Random(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    inputs = [_hidden(i) for i in range(3)]
    outputs = []
    for hidden in inputs:
        state = hidden
        for layer in layers:
            state = layer(hidden_states=state, attention_mask=None)[0]
        outputs.append(state)
    order = [0, 1, 2]
    draw.shuffle(order)
    gradients = {}
    for microbatch in order:
        if session is not None:
            tapes = session.executor.open_tapes()
            for _ in range(40):
                draw.choice(tapes).rebuild_label(draw.choice(EVERYTHING))
        weights = [layer.mlp.linear_fc1.weight for layer in layers]
        loss = outputs[microbatch].square().sum()
        gradients[microbatch] = torch.autograd.grad(loss, [inputs[microbatch], *weights])
    return [gradient for i in range(3) for gradient in gradients[i]]


def groups_come_from_layers(rank: int, world_size: int, model: dict[str, Any]) -> list[str]:
    """Global state names another group than the layers' own; windows must open all the same."""

    def check(chunks: list[Any], model: dict[str, Any]) -> list[str]:
        layer = transformer_layers(chunks)[0][0]
        honest = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = torch.distributed.group.WORLD
        try:
            with _session(chunks, model, "windows") as session:
                out = layer(hidden_states=_hidden(), attention_mask=None)[0]
                torch.autograd.grad(out.sum(), layer.mlp.linear_fc1.weight)
                rebuilt = session.executor.record.rebuilt_storages
        finally:
            parallel_state._TENSOR_MODEL_PARALLEL_GROUP = honest
        return [] if rebuilt["bwd"] else [f"no window opened: {dict(rebuilt)}"]

    return _with_model(model, check)


def second_backward(rank: int, world_size: int, model: dict[str, Any]) -> list[str]:
    """Whether a second backward through a retained graph gets stock's gradients; what differs."""

    def twice(layer: Any) -> list[torch.Tensor]:
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        hidden = _hidden()
        out = layer(hidden_states=hidden, attention_mask=None)[0].square().sum()
        first = torch.autograd.grad(out, hidden, retain_graph=True)
        return [*first, *torch.autograd.grad(out, hidden)]

    def check(chunks: list[Any], model: dict[str, Any]) -> list[str]:
        layer = transformer_layers(chunks)[0][0]
        stock = twice(layer)
        with _session(chunks, model, "full"):
            ours = twice(layer)
        same = all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))
        return [] if same else ["gradients of a second backward"]

    return _with_model(model, check)


def odd_passes(rank: int, world_size: int, plan: str) -> list[str]:
    """Passes that no schedule has, in one step: a second forward before the backward, a forward in training
    mode whose output nobody wants, an evaluation between. What differs from stock, or is left."""

    def passes(layers: list[Any]) -> list[torch.Tensor]:
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)

        def through(hidden: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                hidden = layer(hidden_states=hidden, attention_mask=None)[0]
            return hidden

        first, second = _hidden(1), _hidden(2)
        out = through(first)
        through(_hidden(3))
        with torch.no_grad():
            through(_hidden(4))
        loss = out.square().sum() + through(second).sin().sum()
        weights = [layer.mlp.linear_fc1.weight for layer in layers]
        return list(torch.autograd.grad(loss, [first, second, *weights]))

    def check(chunks: list[Any], model: dict[str, Any]) -> list[str]:
        layers = transformer_layers(chunks)[0]
        stock, different = passes(layers), []
        with _session(chunks, model, plan) as session:
            for _ in range(2):
                with session.step(1):
                    ours = passes(layers)
                if not all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True)):
                    different.append("gradients")
                if session.executor.record.left_bytes:
                    different.append(f"{session.executor.record.left_bytes} bytes are left")
            try:
                Session(
                    session._hooks,
                    session.executor.plan,
                    parallel_of(model),
                    chunks,
                    LayerGraph(regions=(), storages=()),
                )
            except ConfigError as error:
                return different if "bound to another model already" in str(error) else [str(error)]
            return [*different, "a second session was opened"]

    return _with_model({}, check)


def kept_otherwise(rank: int, world_size: int, options: dict[str, Any]) -> list[dict[str, int]]:
    """By region, what a layer keeps other than described: as it is, and with an activation function that
    nobody knows; and what it keeps there by its description and by the graph that is planned with."""
    found: list[dict[str, int]] = []

    @contextlib.contextmanager
    def around(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        model = described_model(options, get_model_config(chunks[0]))
        batch = Batch(seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH, global_batch_size=MICRO_BATCH)
        shape = model, parallel_of(options), batch
        inside = unwrap_model(chunks)
        found.append(traced.kept_otherwise(inside, *shape))
        for layer in transformer_layers(chunks)[0]:
            layer.mlp.activation_func = lambda x: torch.nn.functional.gelu(x) * x.sigmoid()
        found.append(traced.kept_otherwise(inside, *shape))
        graph = layer_graph(*shape)
        found.append(graph.kept_by_region())
        found.append(graph.keeping(found[1]).kept_by_region())
        yield lambda schedule: schedule

    train_small_gpt(steps=0, around=around, **options)
    return found


def strangers(rank: int, world_size: int, where: str) -> tuple[list[str], list[str], int]:
    """A layer with something that no kind describes at path ``where``: what differs from stock under a plan
    that drops everything, which parts ran again, and how many microbatches were trained."""

    def strange(chunks: list[Any]) -> None:
        for layer in transformer_layers(chunks)[0]:
            module = layer.get_submodule(where)
            module.__class__ = type("Strange", (type(module),), {})

    def around(wrap: Any) -> Any:
        @contextlib.contextmanager
        def inside(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
            strange(chunks)
            with wrap(chunks) as schedule:
                yield schedule

        return inside

    again: set[str] = set()
    original = RegionRun.rebuild

    def rebuild(run: RegionRun, wanted: Any) -> None:
        again.add(run.step.name)
        original(run, wanted)

    @contextlib.contextmanager
    def planned(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        with _session(chunks, {}, "full") as session:
            yield session.wrap_schedule

    stock = train_small_gpt(steps=2, around=around(lambda _: contextlib.nullcontext(lambda s: s)))
    RegionRun.rebuild = rebuild  # type: ignore[method-assign]
    try:
        lynx = train_small_gpt(steps=2, around=around(planned))
    finally:
        RegionRun.rebuild = original  # type: ignore[method-assign]
    return differences(stock, lynx), sorted(again), len(lynx["losses"][0])
