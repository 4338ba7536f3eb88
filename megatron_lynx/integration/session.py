"""Session: one rank's plan, bound to its model chunks, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_lynx.errors import ConfigError
from megatron_lynx.graph import LayerGraph
from megatron_lynx.integration.binding import bind, kind_of_layer, layer_index, layers_of, slots_of
from megatron_lynx.integration.checks import plan_for, strangers
from megatron_lynx.integration.windows import Hooks, in_step
from megatron_lynx.plan import StagePlan
from megatron_lynx.runtime.executor import Executor
from megatron_lynx.runtime.program import stage_programs
from megatron_lynx.runtime.record import StepRecord
from megatron_lynx.runtime.rng import RandomSource
from megatron_lynx.schedule import actions
from megatron_lynx.spec import Parallel


class Session:
    """Binds a plan to a model; ``close`` unbinds it.

    Args:
        hooks: of the surrounding ``install``.
        plan: of this pipeline rank.
        parallel: the job's parallel sizes.
        chunks: this rank's model chunks, before or after they are wrapped in DDP.
        graph: of the model's layers, by which the plan was made.
        count_kept: count what each layer keeps, in its first microbatch, for reports.

    Raises:
        ConfigError: a layer is not supported, the layers are not those of the plan, or another session
            is open.
    """

    def __init__(
        self,
        hooks: Hooks,
        plan: StagePlan,
        parallel: Parallel,
        chunks: Sequence[Any],
        graph: LayerGraph,
        *,
        count_kept: bool = False,
    ) -> None:
        if hooks.executor is not None:
            raise ConfigError(
                "--recompute-method lynx is bound to another model already; close that one first"
            )
        self.on_step: Callable[[StepRecord], None] | None = None
        self._hooks = hooks
        self._parallel = parallel
        self.executor = _executor(plan_for(plan, chunks), parallel, chunks, graph, count_kept)
        self._unbind = bind(chunks, self.executor)
        hooks.executor = hooks.watcher = self.executor

    def wrap_schedule(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """A schedule of Megatron's (``get_forward_backward_func()``) that runs as steps of this."""
        return in_step(schedule, self.step)

    @contextmanager
    def step(self, microbatches: int) -> Iterator[None]:
        """One training step: everything is forgotten before it and must be empty after it."""
        executor = self.executor
        executor.begin_step(actions(self._parallel, microbatches, executor.plan.stage))
        try:
            yield
        finally:
            executor.record.left_bytes = sum(tape.held_bytes() for tape in executor.open_tapes())
            executor.clear()
        if self.on_step is not None:
            self.on_step(executor.record)

    def close(self) -> None:
        """Give the model and Megatron back as they were."""
        self._hooks.executor = self._hooks.watcher = None
        self.executor.clear()
        self._unbind()


def _executor(
    plan: StagePlan, parallel: Parallel, chunks: Sequence[Any], graph: LayerGraph, count_kept: bool
) -> Executor:
    """The executor of a plan; a stage without layers has one that has nothing to do."""
    layers = layers_of(chunks)
    parameter = next((p for chunk in chunks for p in chunk.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    kind = kind_of_layer(layers[0]) if layers else None
    strange = {layer_index(layer) for layer in layers if any(strangers(layer, kind_of_layer(layer)))}
    return Executor(
        plan,
        stage_programs(kind, graph, plan, strange) if kind else {},
        rng=RandomSource(get_cuda_rng_tracker, device),
        device=device,
        # The group that the layers communicate over, whatever global state says.
        group=layers[0].tp_group if layers else None,
        forward_slots=kind.forward_slots(parallel) if kind else (),
        backward_slots={layer_index(layer): slots_of(layer, parallel) for layer in layers},
        count_kept=count_kept,
    )
