"""Parameters come back to a linear's backward as themselves (Rule 9 of ``runtime.tape``).

Under hooks for saved tensors autograd makes a fresh tensor of whatever it unpacks, a Parameter included.
Megatron's linear sets ``grad_added_to_main_grad`` on the weight that it saved, which DDP then looks for on
the Parameter: with gradient-accumulation fusion the fresh tensor would lose it.
"""

from __future__ import annotations

from typing import Any

import torch


class _Context:
    """The context of an autograd Function, with the Parameters among its saved tensors put back."""

    def __init__(self, ctx: Any, parameters: tuple[torch.nn.Parameter, ...]) -> None:
        object.__setattr__(self, "_ctx", ctx)
        object.__setattr__(self, "_parameters", parameters)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What the Function saved."""
        return tuple(self._itself(tensor) for tensor in self._ctx.saved_tensors)

    def _itself(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        same = (p for p in self._parameters if p.data_ptr() == tensor.data_ptr() and p.shape == tensor.shape)
        return next(same, tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def keeping_parameters(original: Any, hooks: Any) -> Any:
    """A subclass of the autograd Function ``original`` whose backward finds the Parameters that its forward
    was given."""

    class KeepingParameters(original):
        """``original``, with Parameters that stay themselves while a plan is bound."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            """``original``'s forward."""
            out = original.forward(ctx, *args)
            # Only what marks its weight needs the Parameter, and only where hooks are set it is lost.
            if hooks.executor is not None and hooks.executor.hooking and ctx.gradient_accumulation_fusion:
                ctx.lynx_parameters = tuple(a for a in args if isinstance(a, torch.nn.Parameter))
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            """``original``'s backward."""
            parameters = getattr(ctx, "lynx_parameters", ())
            return original.backward(_Context(ctx, parameters) if parameters else ctx, *gradients)

    KeepingParameters.__name__ = KeepingParameters.__qualname__ = original.__name__
    return KeepingParameters
