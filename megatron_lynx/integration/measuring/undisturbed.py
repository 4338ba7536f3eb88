"""Measuring leaves a model as it was: hooks, attributes, buffers, what gradients go into, random state.

A layer that is measured runs as in training, so whatever watches a training step would count, gather or
accumulate for it: the pre-hooks with which DDP waits for gathered parameters, a user's hooks, the
counters of a module, gradients that a kernel adds to the main gradient by itself.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config
from torch.nn.modules import module as torch_module

from megatron_lynx.runtime.rng import RandomSource


@contextlib.contextmanager
def undisturbed(chunks: Sequence[Any]) -> Iterator[None]:
    """Inside, the modules of ``chunks`` run without hooks; afterwards they are as they were.

    ``chunks`` are the model's own, inside their DDP wrappers.
    """
    modules = list({id(m): m for chunk in chunks for m in chunk.modules()}.values())
    parameters = list({id(p): p for chunk in chunks for p in chunk.parameters()}.values())
    device = parameters[0].device if parameters else None
    random = RandomSource(get_cuda_rng_tracker, device, everything=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(random.replaying(random.capture()))
        stack.enter_context(_without_global_hooks())
        stack.enter_context(_prediction_losses())
        stack.enter_context(_parameter_attributes(parameters))
        if any(get_model_config(chunk).gradient_accumulation_fusion for chunk in chunks):
            _scratch_gradients(parameters)
        for module in modules:
            stack.enter_context(_attributes(module))
            for name in _HOOKS & module.__dict__.keys():
                module.__dict__[name] = OrderedDict()
        yield


_HOOKS = frozenset(
    name for name in torch.nn.Module().__dict__ if "_hooks" in name and "state_dict" not in name
)
"""Where a module holds the hooks of its calls, by attribute."""


@contextlib.contextmanager
def _attributes(module: Any) -> Iterator[None]:
    """Put back a module's attributes (hooks, training mode, counters, inputs) and its buffers' values."""
    before = dict(module.__dict__)
    buffers = {name: (b, b.clone()) for name, b in module._buffers.items() if b is not None}
    names = dict(module._buffers)
    try:
        yield
    finally:
        module.__dict__.clear()
        module.__dict__.update(before)
        module._buffers.clear()
        module._buffers.update(names)
        with torch.no_grad():
            for buffer, value in buffers.values():
                buffer.copy_(value)


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Take away the hooks of all modules' calls."""
    names = [name for name in vars(torch_module) if name.startswith("_global_") and name.endswith("_hooks")]
    before = {name: getattr(torch_module, name) for name in names}
    for name in names:
        setattr(torch_module, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in before.items():
            setattr(torch_module, name, hooks)


@contextlib.contextmanager
def _prediction_losses() -> Iterator[None]:
    """Put back what is summed up of the losses of multi-token prediction until it is logged."""
    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tracker.items()}
    try:
        yield
    finally:
        tracker.clear()
        tracker.update(before)


@contextlib.contextmanager
def _parameter_attributes(parameters: Sequence[Any]) -> Iterator[None]:
    """Put back what is noted down on parameters; inside, their gradients' hooks are gone."""
    before = [(p, dict(vars(p)), p._backward_hooks) for p in parameters]
    for parameter in parameters:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, attributes, hooks in before:
            vars(parameter).clear()
            vars(parameter).update(attributes)
            parameter._backward_hooks = hooks


def _scratch_gradients(parameters: Sequence[Any]) -> None:
    """Let kernels that add to ``main_grad`` by themselves add to one scratch tensor."""
    scratch: dict[Any, torch.Tensor] = {}
    size = max(p.numel() for p in parameters)
    for parameter in parameters:
        grad = vars(parameter).get("main_grad")
        if isinstance(grad, torch.Tensor):
            key = (grad.dtype, grad.device)
            if key not in scratch:
                scratch[key] = torch.empty(size, dtype=grad.dtype, device=grad.device)
            parameter.main_grad = scratch[key][: parameter.numel()].view(grad.shape)
