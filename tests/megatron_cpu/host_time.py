"""How much of the host a method takes: CPU time of a layer and microbatch, forward and backward.

Tensors are tiny and one core runs everything, so what is measured is Python, autograd and kernel launches.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatron_lynx.integration.install import install
from megatron_lynx.integration.session import Session
from megatron_lynx.layers import KINDS
from megatron_lynx.plan import LayerPlan, StagePlan
from tests.megatron_cpu.lynx_ranks import described_graph, parallel_of
from tests.support.small_gpt import LAYERS, MICROBATCHES, train_small_gpt

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Times = list[float]


def measure(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    """Milliseconds of CPU time a layer and microbatch by method, medians over ``rounds``: stock, stock with
    its own recomputation, and lynx dropping nothing, each region alone, and everything."""
    regions = [name for name in KINDS["local"].names if name != KINDS["local"].output]
    plans = {"lynx, nothing": (), **{f"lynx, {name}": (name,) for name in regions}}
    plans["lynx, everything"] = tuple(regions)
    found: dict[str, Times] = {}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, options in (("stock", {}), ("stock selective", {"recompute_granularity": "selective"})):
            found.setdefault(name, []).append(_step_ms(_stock, options))
        found.setdefault("stock full", []).append(_step_ms(_stock, FULL))
        for name, dropped in plans.items():
            found.setdefault(name, []).append(_step_ms(_under(dropped), {}))
        gc.collect()
    return {name: statistics.median(times) for name, times in found.items()}


Around = Callable[[list[Any]], contextlib.AbstractContextManager[Callable[..., Any]]]


@contextlib.contextmanager
def _stock(_: list[Any]) -> Iterator[Callable[..., Any]]:
    yield lambda schedule: schedule


def _under(dropped: tuple[str, ...]) -> Around:
    @contextlib.contextmanager
    def around(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        layers = tuple(
            LayerPlan(layer=layer, choices=tuple((name, "demand") for name in dropped))
            for layer in range(LAYERS)
        )
        plan = StagePlan(stage=0, chunks=(tuple(range(LAYERS)),), layers=layers)
        with install() as hooks:
            session = Session(hooks, plan, parallel_of({}), chunks, described_graph({}, chunks))
            yield session.wrap_schedule
            session.close()

    return around


def _step_ms(around: Around, options: dict[str, Any]) -> float:
    """The quickest of ten steps."""
    times: Times = []

    @contextlib.contextmanager
    def timed(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        with around(chunks) as wrap:

            def outer(schedule: Callable[..., Any]) -> Callable[..., Any]:
                inner = wrap(schedule)

                def run(*args: Any, **kwargs: Any) -> Any:
                    start = time.process_time()
                    result = inner(*args, **kwargs)
                    times.append(time.process_time() - start)
                    return result

                return run

            yield outer

    train_small_gpt(steps=10, around=timed, keep_gradients=False, **options)
    return min(times) / (LAYERS * MICROBATCHES) * 1e3
