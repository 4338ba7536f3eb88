"""The norm that Megatron's local layer spec lacks: LayerNorm and RMSNorm under sequence parallelism.

Without Transformer Engine and Apex, Megatron's local spec builds norms with ``WrappedTorchNorm``,
which refuses sequence parallelism and does not mark its parameters, so that
``finalize_model_grads`` would not sum their gradients over the tensor parallel group. The norms
here are torch's own modules with marked parameters: without sequence parallelism they compute what
``WrappedTorchNorm``'s compute, to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_lynx.errors import ConfigError

# By Megatron's name of the normalization, as in ``--normalization``.
_NORMS: dict[str, Any] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}

_UNSUPPORTED = {
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p: torch's norms have no zero-centred weight; "
    "drop the flag",
    "persist_layer_norm": "the persistent layer norm is a kernel of Apex, which is not installed; "
    "add --no-persist-layer-norm",
    "memory_efficient_layer_norm": "--memory-efficient-layer-norm is a kernel of Apex, which is not "
    "installed; drop the flag",
}


def build_norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any
) -> torch.nn.Module:
    """A norm over the last ``hidden_size`` elements; the signature is ``WrappedTorchNorm.__new__``'s.

    Every parameter carries ``sequence_parallel``, as ``finalize_model_grads`` wants it.
    """
    for field, message in _UNSUPPORTED.items():
        if getattr(config, field, False):
            raise ConfigError(message)
    if config.normalization not in _NORMS:
        raise ConfigError(f"--normalization {config.normalization}: expected one of {', '.join(_NORMS)}")
    norm: torch.nn.Module = _NORMS[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


@contextlib.contextmanager
def sequence_parallel_norm() -> Iterator[None]:
    """Let Megatron's local spec build norms under sequence parallelism, until the block ends.

    Every module of Megatron holds the class ``WrappedTorchNorm`` under a name of its own, so the
    class stays and its ``__new__`` is replaced. Entering it a second time changes nothing.
    """
    original = WrappedTorchNorm.__dict__["__new__"]
    WrappedTorchNorm.__new__ = staticmethod(build_norm)
    try:
        yield
    finally:
        WrappedTorchNorm.__new__ = original
