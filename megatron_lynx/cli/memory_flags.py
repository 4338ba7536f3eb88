"""Megatron's flags about kernels, gradients and the optimizer's state, and what they imply.

``complete`` does what ``validate_args`` does with them: a flag may set another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_lynx.spec import Optimizer


def complete(values: dict[str, Any]) -> None:
    """Fill in what these flags imply."""
    half = values.get("dtype_bytes", 4) == 2
    bf16 = half and not values.pop("fp16", False)
    reduced = values.pop("grad_reduce_in_bf16", False)
    main = values.pop("main_grads_dtype", "fp32")
    if half:
        values.setdefault("accumulate_allreduce_grads_in_fp32", bf16 and not reduced and main == "fp32")
    values.setdefault("mask_from_data", True)
    local = values.setdefault("transformer_impl", "transformer_engine") == "local"
    backend = values.pop("attention_backend", "auto")
    values["attention"] = "unfused" if local or backend in ("unfused", "local") else _kernel(backend)


def _kernel(backend: str) -> str:
    """Transformer Engine's choice where it is free: see ``for_device``."""
    return "flash" if backend == "flash" else "fused" if backend == "fused" else "auto"


def for_device(values: dict[str, Any], device: str) -> None:
    """Where Megatron leaves the kernels of attention to Transformer Engine (``auto``), it takes cuDNN's
    from Hopper on and the flash-attn package before (``get_attention_backend``)."""
    if values.get("attention") == "auto" and values.get("transformer_impl") == "local":
        values["attention"] = "unfused"
    elif values.get("attention") == "auto":
        values["attention"] = "flash" if device.startswith(("A100", "A800", "V100")) else "fused"


def optimizer_from(values: Mapping[str, Any]) -> Optimizer:
    """The optimizer that the values describe."""
    return Optimizer(
        **{field.name: values[field.name] for field in fields(Optimizer) if field.name in values}
    )
