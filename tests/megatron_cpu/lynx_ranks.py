"""Functions that run inside ranks: train stock and under plans, and compare bit for bit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lynx.gpt import backward_slots, forward_slots
from megatron_lynx.integration.binding import transformer_layers
from megatron_lynx.integration.install import install
from megatron_lynx.integration.session import Session
from megatron_lynx.plan import Choice, LayerPlan, StagePlan, Window
from megatron_lynx.runtime.record import StepRecord
from megatron_lynx.spec import Parallel
from tests.support.small_gpt import train_small_gpt

DROPPABLE = (
    "input_layernorm",
    "linear_qkv",
    "qkv_split",
    "core_attention",
    "self_attn_dropout",
    "pre_mlp_layernorm",
    "linear_fc1",
    "activation",
    "mlp_dropout",
)
BEHIND_COLLECTIVES = ("linear_proj", "self_attn_bda")


@dataclass
class Case:
    """A model and its parallel sizes (keywords of ``train_small_gpt``) and the plans to try."""

    model: dict[str, Any]
    plans: list[str] = field(default_factory=list)
    steps: int = 3


def stage_plan(name: str, stage: int, chunks: tuple[tuple[int, ...], ...], parallel: Parallel) -> StagePlan:
    """A plan by name; ``random-SEED`` draws any assignment of regions to windows."""
    layers = tuple(layer for chunk in chunks for layer in chunk)
    draw = random.Random(f"{name}/{stage}")
    return StagePlan(
        stage=stage,
        chunks=chunks,
        layers=tuple(
            LayerPlan(layer=layer, choices=tuple(_choices(name, layer, layers, parallel, draw)))
            for layer in layers
        ),
    )


def _choices(
    name: str, layer: int, layers: tuple[int, ...], parallel: Parallel, draw: random.Random
) -> Iterator[tuple[str, Choice]]:
    everything = (*DROPPABLE[:4], *BEHIND_COLLECTIVES, *DROPPABLE[4:])
    if name == "none":
        return
    if name == "selective":
        yield "core_attention", "demand"
    elif name == "full":
        yield from ((region, "demand") for region in everything)
    elif name == "uniform-2":
        if layer % 2 and layer - 1 in layers:
            yield "input", "demand"
        yield from ((region, "demand") for region in everything)
    elif name == "windows":
        yield from _windows(layer, layers, parallel)
    else:
        windows: list[Choice] = ["keep", "demand", Window("stall"), Window("head")]
        for other in layers:
            windows += [Window("fwd", other, slot) for slot in forward_slots(parallel)]
            windows += [Window("bwd", other, slot) for slot in backward_slots(parallel)]
        for region in everything:
            choice = draw.choice(windows)
            if choice != "keep":
                yield region, choice


def _windows(layer: int, layers: tuple[int, ...], parallel: Parallel) -> Iterator[tuple[str, Choice]]:
    """Attention in the MLP's backward windows of the same layer, MLP in those of the layer after."""
    slots = backward_slots(parallel)
    attention: Choice = Window("bwd", layer, slots[0]) if slots else Window("stall")
    after = layer + 1 if layer + 1 in layers else None
    mlp: Choice = (
        Window("head") if after is None else Window("bwd", after, slots[-1]) if slots else Window("stall")
    )
    for region in DROPPABLE:
        if parallel.sequence_parallel and region in ("linear_qkv", "linear_fc1"):
            continue
        yield region, attention if region in DROPPABLE[:5] else mlp


def parallel_of(model: dict[str, Any]) -> Parallel:
    """The parallel sizes of a case."""
    return Parallel(
        tp=model.get("tp", 1),
        pp=model.get("pp", 1),
        vpp=model.get("vpp") or 1,
        sequence_parallel=model.get("sequence_parallel", False),
    )


def train_with_plan(
    model: dict[str, Any], name: str, steps: int, on_step: Callable[[StepRecord], None] | None = None
) -> dict[str, Any]:
    """Train under a plan; the result has ``records`` too, one StepRecord a step."""
    records: list[StepRecord] = []

    @contextlib.contextmanager
    def around(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        from megatron.core import parallel_state

        parallel = parallel_of(model)
        owned = tuple(
            tuple(layer.layer_number - 1 for layer in layers) for layers in transformer_layers(chunks)
        )
        plan = stage_plan(name, parallel_state.get_pipeline_model_parallel_rank(), owned, parallel)
        with install() as hooks:
            session = Session(hooks, plan, parallel, chunks)
            session.on_step = lambda record: (records.append(record), on_step and on_step(record))
            yield session.wrap_schedule
            session.close()

    result = train_small_gpt(steps=steps, around=around, **model)
    return {**result, "records": records}


def differences(stock: dict[str, Any], lynx: dict[str, Any]) -> list[str]:
    """What differs in any bit: losses, gradient norms, gradients, parameters."""
    found = []
    for key in ("losses", "grad_norms"):
        if stock[key] != lynx[key]:
            found.append(f"{key}: {stock[key]} != {lynx[key]}")
    for step, (ours, theirs) in enumerate(zip(stock["gradients"], lynx["gradients"], strict=True)):
        found += [f"gradient {n} of step {step}" for n in ours if not torch.equal(ours[n], theirs[n])]
    found += [n for n, p in stock["parameters"].items() if not torch.equal(p, lynx["parameters"][n])]
    return found


def compare(rank: int, world_size: int, cases: list[Case]) -> list[tuple[str, list[str], list[StepRecord]]]:
    """For each case and plan: its name, what differs from stock Megatron, and the records."""
    found = []
    for case in cases:
        stock = train_small_gpt(steps=case.steps, **case.model)
        for name in case.plans:
            lynx = train_with_plan(case.model, name, case.steps)
            found.append((f"{case.model} {name}", differences(stock, lynx), lynx["records"]))
    return found
