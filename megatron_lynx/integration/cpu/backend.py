"""The CPU backend: lets Megatron train on a machine without a GPU, over gloo.

Megatron has no CPU mode: it names the device ``cuda`` in some hundred places. Inside
``cpu_backend()`` those places mean the CPU. Nothing is simulated: every tensor is computed, every
collective and every transfer between pipeline stages happens. Three means, all undone at exit:

1. a ``TorchFunctionMode`` that rewrites the device of every call into torch;
2. a table of replaced attributes, most of them below ``torch.cuda`` (see ``cuda``);
3. the norm that Megatron's local spec lacks for sequence parallelism (see ``norm``).

It is opt-in (``MEGATRON_LYNX_CPU=1``) and refuses to run where CUDA is present, because there it
would only hide the GPU. Memory measured under it differs from a GPU's in one point: on a CPU
dropout saves its mask in the activation's type, not in one byte per element.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_lynx.errors import ConfigError
from megatron_lynx.integration.cpu import cuda as cpu_cuda
from megatron_lynx.integration.cpu.dataset_helpers import shipped_dataset_helpers
from megatron_lynx.integration.cpu.norm import sequence_parallel_norm

ENVIRONMENT_VARIABLE = "MEGATRON_LYNX_CPU"

_CPU = torch.device("cpu")
_RNG_MODULE = "megatron.core.tensor_parallel.random"

_active = False


def cpu_requested(environment: dict[str, str] | None = None) -> bool:
    """Whether ``MEGATRON_LYNX_CPU`` asks for the CPU backend; unset, empty and 0 mean no."""
    value = (os.environ if environment is None else environment).get(ENVIRONMENT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}={value!r}: expected 1 (train on CPU) or 0")
    return value == "1"


def cpu_backend_active() -> bool:
    """Whether this process is inside ``cpu_backend()``."""
    return _active


@contextlib.contextmanager
def cpu_backend() -> Iterator[None]:
    """Make ``cuda`` mean the CPU until the end of the ``with`` block.

    Enter it before the process group is made, and in the thread that trains: a thread that
    creates tensors of its own enters ``cpu_device_mode()`` too. Autograd needs nothing: on CPU it
    runs in the thread that called ``backward()``.
    """
    global _active
    if _active:
        raise ConfigError("cpu_backend() is active already; enter it once, around the whole run")
    if torch.cuda.is_available():
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}=1, but CUDA is present ({torch.cuda.device_count()} devices): "
            f"unset {ENVIRONMENT_VARIABLE} to train on the GPU, or hide it with CUDA_VISIBLE_DEVICES="
        )
    # Imported first: what Megatron binds at import must be torch's own, or undo could not reach it.
    importlib.import_module(_RNG_MODULE)
    with contextlib.ExitStack() as undo:
        for owner, name, value in _replacements():
            undo.enter_context(_replaced(owner, name, value))
        undo.enter_context(_without_rng_noise())
        undo.enter_context(_without_compiler())
        undo.enter_context(sequence_parallel_norm())
        undo.enter_context(shipped_dataset_helpers())
        undo.enter_context(cpu_device_mode())
        _active = True
        try:
            yield
        finally:
            _active = False


@contextlib.contextmanager
def cpu_backend_if_requested() -> Iterator[bool]:
    """``cpu_backend()`` where ``MEGATRON_LYNX_CPU=1``, else nothing; yields which it was."""
    if not cpu_requested():
        yield False
        return
    with cpu_backend():
        yield True


# --- 1. the device of every call into torch -----------------------------------------------------


def cpu_device_mode() -> TorchFunctionMode:
    """A context in which every torch call of this thread that names ``cuda`` gets the CPU."""
    return _CudaMeansCpu()


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the ``device`` of factories and conversions, and the few methods in ``_METHODS``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        method = _METHODS.get(func)
        if method is not None:
            return method(func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        return func(*args, **_on_cpu(kwargs))


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("pin_memory"):  # pinning needs a CUDA context
        kwargs = {**kwargs, "pin_memory": False}
    if _names_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": _CPU}
    return kwargs


def _names_cuda(device: object) -> bool:
    """An index is CUDA's too: that is what ``torch.cuda.current_device()`` gives."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 and _names_cuda(args[1]):
        args = (args[0], _CPU, *args[2:])
    return func(*args, **_on_cpu(kwargs))


def _same_tensor(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """``.cuda()`` of a tensor on the device, or ``.pin_memory()``: that tensor."""
    return args[0]


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Megatron sorts parameters by names such as ``torch.cuda.FloatTensor``."""
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
    result = func(*args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result


def _nothing(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    return None


_METHODS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
    torch.Tensor.type: _type,
    torch.Tensor.record_stream: _nothing,
}


# --- 2. replaced attributes ---------------------------------------------------------------------


def _replacements() -> Iterator[tuple[Any, str, object]]:
    """(owner, attribute, replacement) for everything outside the mode's reach."""
    for path, value in cpu_cuda.attributes().items():
        *parents, name = path.split(".")
        yield importlib.import_module(".".join(["torch.cuda", *parents])), name, value
    rng = importlib.import_module(_RNG_MODULE)
    yield rng, "_lazy_call", cpu_cuda.lazy_call  # bound by name when the module was imported
    yield rng, "_lazy_init", cpu_cuda.ignore
    yield rng, "device_ctx_manager", cpu_cuda.device_context
    yield torch.accelerator, "is_available", _no_accelerator
    yield torch.accelerator, "current_accelerator", _current_accelerator
    for owner in (torch.autograd, torch.autograd.graph):
        yield owner, "_engine_run_backward", _engine_run_backward(owner._engine_run_backward)
    yield torch.utils.data.DataLoader, "__init__", _data_loader_init(torch.utils.data.DataLoader.__init__)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    missing = object()
    original = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _no_accelerator() -> bool:
    """torch's optimizers ask this before they look for a CUDA graph that is being captured."""
    return False


def _current_accelerator(check_available: bool = False) -> None:
    """As ``_no_accelerator``."""
    return


def _engine_run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The mode is off inside what it dispatches, and it dispatches ``backward()``: on again for the nodes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with cpu_device_mode():
            return original(*args, **kwargs)

    return run


def _data_loader_init(original: Callable[..., None]) -> Callable[..., None]:
    """Data loaders without pinned memory, and with a generator of their own.

    An iterator over a data loader draws a seed from the CPU generator. On a GPU that leaves the
    dropout of the device alone; here both are one generator, and since only the first rank of a
    tensor parallel group reads data, the ranks of the group would no longer drop the same elements.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        original(self, *args, **kwargs)

    return init


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Run what Megatron compiles as plain Python: compiling needs a C++ compiler and minutes."""
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


class _RngNoise(logging.Filter):
    """Drops one message: with one generator for both devices it is true of every draw."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.getMessage() != "CPU RNG state changed within GPU RNG context"


@contextlib.contextmanager
def _without_rng_noise() -> Iterator[None]:
    noise, logger = _RngNoise(), logging.getLogger(_RNG_MODULE)
    logger.addFilter(noise)
    try:
        yield
    finally:
        logger.removeFilter(noise)
