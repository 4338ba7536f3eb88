"""Session: one rank's plan, bound to its model chunks, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_lynx.integration.binding import bind, transformer_layers
from megatron_lynx.integration.windows import Hooks, in_step
from megatron_lynx.layers.local import backward_slots, forward_slots
from megatron_lynx.plan import StagePlan
from megatron_lynx.runtime.executor import Executor
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
        count_kept: let layers that drop nothing count what they keep too, for reports.

    Raises:
        ConfigError: a layer is not supported, or the layers are not those of the plan.
    """

    def __init__(
        self,
        hooks: Hooks,
        plan: StagePlan,
        parallel: Parallel,
        chunks: Sequence[Any],
        *,
        count_kept: bool = False,
    ) -> None:
        layers = [layer for chunk in transformer_layers(chunks) for layer in chunk]
        self.config = layers[0].config
        device = next(layers[0].parameters()).device
        self.on_step: Callable[[StepRecord], None] | None = None
        self._hooks = hooks
        self._parallel = parallel
        # The group that the layers communicate over, whatever global state says.
        group = layers[0].self_attention.linear_proj.tp_group
        self.executor = Executor(
            plan,
            rng=RandomSource(get_cuda_rng_tracker, device),
            device=device,
            group=group,
            forward_slots=forward_slots(parallel),
            backward_slots=backward_slots(parallel),
            draws=drawing_regions(self.config),
            communicates=frozenset(forward_slots(parallel)),
            count_kept=count_kept,
        )
        self._unbind = bind(chunks, self.executor)
        hooks.executor = self.executor

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
        self._hooks.executor = None
        self.executor.clear()
        self._unbind()


def drawing_regions(config: Any) -> frozenset[str]:
    """Regions of a layer that use random state, by Megatron's config."""
    draws: set[str] = set()
    if config.attention_dropout:
        draws.add("core_attention")
    if config.hidden_dropout:
        draws |= {"self_attn_bda", "mlp_bda"}
    return frozenset(draws)
