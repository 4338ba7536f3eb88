"""What the tests of Transformer Engine layers run on their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.megatron_cpu.lynx_ranks import Assignment, counted_collectives, train_with_plan
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


def what_stops(rank: int, world_size: int, models: list[dict[str, Any]]) -> list[str]:
    """What a kernel that dense layers do not call says, and what stops stock's training of each model."""
    import transformer_engine_torch

    calls: list[Callable[[], Any]] = [lambda: transformer_engine_torch.moe_permute_fwd(None)]
    calls += [partial(train_small_gpt, steps=1, **model) for model in models]
    found = []
    for call in calls:
        try:
            call()
        except (NotImplementedError, RuntimeError, TypeError) as error:
            found.append(str(error))
    return found


def extra_work(
    rank: int, world_size: int, asked: tuple[list[dict[str, Any]], list[str]]
) -> list[dict[str, dict[str, int]]]:
    """For each model, by region: kernels and collectives that one step runs beyond stock's when each layer
    drops that region."""
    models, regions = asked

    def work(run: Callable[[], object]) -> Counter[str]:
        te_reference.CALLS.clear()
        collectives: Counter[str] = Counter()
        with counted_collectives(collectives):
            run()
        return Counter(te_reference.CALLS) + collectives

    found = []
    for model in models:
        stock = work(partial(train_small_gpt, steps=1, **model))
        extra = {}
        for region in regions:
            plan: Assignment = {layer: {region: "demand"} for layer in range(LAYERS)}
            extra[region] = dict(work(partial(train_with_plan, model, plan, 1)) - stock)
        found.append(extra)
    return found
