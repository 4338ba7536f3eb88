"""Recomputation methods that can be switched on and off on one built model, step by step.

Megatron reads some of its ``recompute_*`` options when a layer runs and copies others into the
layer when it is built. Both kinds are set here, so that all methods share one process, one model
and one random stream, and differ in nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_model_config

from megatron_lynx.graph import LayerGraph
from megatron_lynx.integration.binding import layers_of
from megatron_lynx.integration.session import Session
from megatron_lynx.integration.windows import Hooks
from megatron_lynx.plan import LayerPlan, Plan, StagePlan, Window
from megatron_lynx.spec import Parallel

LEFT_OUT = {
    "layernorm": "Megatron discards a norm's output with CheckpointWithoutOutput, which without Transformer "
    "Engine ends in a NameError (FP8GlobalStateManager)",
    "moe_act": "there are no experts in this model",
    "moe": "there are no experts in this model",
    "shared_experts": "there are no experts in this model",
    "mla_up_proj": "there is no latent attention in this model",
    "gdn_norm_out": "there is no gated delta net in this model",
}
"""Values of ``--recompute-modules`` that the bench leaves out, and why."""

MLP_WITH_BIAS = (
    "Megatron's checkpoint returns its last bias from an autograd function, which makes the "
    "parameter a result of that function; its backward then runs itself without end "
    "(--disable-bias-linear works)"
)
"""Why ``--recompute-modules mlp`` is left out where linears have biases."""

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What a method does to the schedule's function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """One of Megatron's own methods, as the values of its options."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()

    @contextlib.contextmanager
    def active(self, chunks: Sequence[Any]) -> Iterator[Wrap]:
        """Set the options on the configuration and on every layer, until the block ends."""
        config = get_model_config(chunks[0])
        selective = self.granularity == "selective"
        core, mlp = selective and "core_attn" in self.modules, selective and "mlp" in self.modules
        with contextlib.ExitStack() as undo:
            for name, value in (
                ("recompute_granularity", self.granularity),
                ("recompute_method", self.method),
                ("recompute_num_layers", self.num_layers),
                ("recompute_modules", list(self.modules)),
            ):
                undo.enter_context(_attribute(config, name, value))
            for block in (m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerBlock)):
                undo.enter_context(_attribute(block, "checkpoint_core_attention", core))
            for layer in layers_of(chunks):
                undo.enter_context(_attribute(layer.self_attention, "checkpoint_core_attention", core))
                undo.enter_context(_attribute(layer, "recompute_mlp", mlp))
            yield lambda schedule: schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Lynx:
    """A plan that the runtime carries out; ``session`` is the live one while it is active."""

    stage: StagePlan
    parallel: Parallel
    graph: LayerGraph
    hooks: Hooks

    @contextlib.contextmanager
    def active(self, chunks: Sequence[Any], on_step: Callable[[Any], None] | None = None) -> Iterator[Wrap]:
        """Bind the plan until the block ends; ``on_step`` is told each step's record."""
        session = Session(self.hooks, self.stage, self.parallel, chunks, self.graph)
        session.on_step = on_step
        try:
            yield session.wrap_schedule
        finally:
            session.close()


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def without_windows(plan: Plan) -> Plan:
    """The same plan with everything that a window would rebuild rebuilt on demand instead."""

    def bare(layer: LayerPlan) -> LayerPlan:
        return replace(
            layer,
            choices=tuple((n, "demand" if isinstance(c, Window) else c) for n, c in layer.choices),
        )

    stages = tuple(replace(s, layers=tuple(bare(layer) for layer in s.layers)) for s in plan.stages)
    return replace(plan, planner=f"{plan.planner}-on-demand", stages=stages)


def dropping(plan: Plan, name: str, regions: Sequence[str]) -> Plan:
    """``plan``'s stages with ``regions`` of every layer rebuilt on demand and all else kept."""
    choices = tuple((region, "demand") for region in regions)
    stages = tuple(
        replace(s, layers=tuple(LayerPlan(layer=layer.layer, choices=choices) for layer in s.layers))  # type: ignore[arg-type]
        for s in plan.stages
    )
    return replace(plan, planner=name, stages=stages)
