"""Runs code again so that nobody outside the layer sees it: past module hooks, without a trace on modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def without_hooks(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, the hooks of ``modules`` are gone."""
    loud = [(m, name) for m in modules for name in _HOOKS if m.__dict__[name]]
    before = [(module, name, module.__dict__[name]) for module, name in loud]
    for module, name in loud:
        module.__dict__[name] = OrderedDict()
    try:
        yield
    finally:
        for module, name, hooks in before:
            module.__dict__[name] = hooks


@contextmanager
def without_traces(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Afterwards ``modules`` have the attributes that they had before.

    A replay ends in the middle of their forwards, where what they unset at their end still holds a tensor.
    """
    before = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for now, then in before:
            now.clear()
            now.update(then)


class QuietCall:
    """A module's own forward, for running it again: without the hooks of the modules inside it.

    ``ended`` are the modules that run code of their own between that of others, itself among them;
    ``quietly`` is a context without the ranges that Megatron's forward opens for profilers, which a replay
    that ends in the middle would leave open.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        inside: Sequence[torch.nn.Module],
        ended: Sequence[torch.nn.Module],
        quietly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._forward = forward
        self._inside = tuple(inside)
        self._ended = tuple(ended)
        self._quietly = quietly

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward."""
        with self._quietly(), without_traces(self._ended), without_hooks(self._inside):
            return self._forward(*args, **kwargs)
