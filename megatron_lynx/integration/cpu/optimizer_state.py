"""What the distributed optimizer lacks without Transformer Engine and Apex: loading a checkpoint.

Megatron then runs on torch's AdamW, whose state exists only after a first step. Before it
``DistributedOptimizer.state_dict``, which loading calls, finds no ``step`` and fails an assertion; while
loading, it asks a checkpoint for each parameter's ``step``, which is saved once, and writes into parameters
that autograd watches; and after loading, all would share one ``step`` tensor, which AdamW counts up in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer


def needs_optimizer_state() -> bool:
    """Whether Megatron runs on torch's AdamW, for want of Transformer Engine and Apex."""
    return not getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)


@contextlib.contextmanager
def loadable_optimizer_state() -> Iterator[None]:
    """Let the distributed optimizer load checkpoints on torch's AdamW, until the block ends.

    Does nothing where Megatron has the optimizer that it was written for.
    """
    if not needs_optimizer_state():
        yield
        return
    cls = distrib_optimizer.DistributedOptimizer
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    def with_state(self: Any) -> Any:
        if not self.optimizer.state:
            _fill(self.optimizer)
        return state_dict(self)

    def with_own_steps(self: Any, saved: Any) -> Any:
        result = load_state_dict(self, saved)
        for one in self.optimizer.state.values():
            one["step"] = one["step"].clone()
        return result

    @torch.no_grad()
    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[parameter]
        own = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        set_states(self, parameter, {"step": own["step"], **tensors})

    cls.state_dict, cls.load_state_dict = with_state, with_own_steps
    cls._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        cls.state_dict, cls.load_state_dict = state_dict, load_state_dict
        cls._set_main_param_and_optimizer_states = set_states


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """The state that AdamW would make in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
