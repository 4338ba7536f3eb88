"""What the tests of Transformer Engine layers run on their ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.megatron_cpu.lynx_ranks import train_with_plan
from tests.support import te_reference
from tests.support.small_gpt import LAYERS, train_small_gpt


def train(rank: int, world_size: int, payload: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train a small GPT with each set of options; also counts the kernels of each."""
    results = {}
    for name, options in payload.items():
        te_reference.CALLS.clear()
        results[name] = train_small_gpt(**options)
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


def extra_kernels(
    rank: int, world_size: int, asked: tuple[dict[str, Any], list[str]]
) -> dict[str, dict[str, int]]:
    """By region: kernels that one step runs beyond stock's when each layer drops that region."""
    model, regions = asked
    te_reference.CALLS.clear()
    train_small_gpt(steps=1, **model)
    stock = Counter(te_reference.CALLS)
    found = {}
    for region in regions:
        te_reference.CALLS.clear()
        train_with_plan(model, {layer: {region: "demand"} for layer in range(LAYERS)}, 1)
        found[region] = dict(Counter(te_reference.CALLS) - stock)
    return found
