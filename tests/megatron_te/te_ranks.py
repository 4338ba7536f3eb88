"""What the tests of Transformer Engine layers run on their ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend

from tests.support import te_reference
from tests.support.small_gpt import train_small_gpt


def train(rank: int, world_size: int, payload: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train a small GPT with each set of options; also counts the kernels of each."""
    results = {}
    for name, options in payload.items():
        te_reference.CALLS.clear()
        results[name] = train_small_gpt(**_resolved(options))
        results[name]["calls"] = dict(te_reference.CALLS)
    return results


def call_what_is_missing(rank: int, world_size: int, payload: None) -> str:
    """What a kernel that dense layers do not call says."""
    import transformer_engine_torch

    try:
        transformer_engine_torch.moe_permute_fwd(None)
    except NotImplementedError as error:
        return str(error)
    return ""


def _resolved(options: dict[str, Any]) -> dict[str, Any]:
    """Names of things that do not travel by pickle before Megatron is imported, as those things."""
    options = dict(options)
    if "attention" in options:
        options["attention_backend"] = AttnBackend[options.pop("attention")]
    if "activation" in options:
        options["activation_func"] = getattr(torch.nn.functional, options.pop("activation"))
    return options
