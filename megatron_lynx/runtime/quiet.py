"""Runs code again without the hooks of the modules inside it: nobody outside the layer sees a replay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


class QuietCall:
    """A submodule's own forward, for running it again: without the hooks of what is inside it."""

    def __init__(self, forward: Callable[..., Any], inside: Sequence[torch.nn.Module]) -> None:
        self._forward = forward
        self._inside = tuple(inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward."""
        with without_hooks(self._inside):
            return self._forward(*args, **kwargs)
