"""Times pieces of a program on this rank: regions of a layer, GEMMs, collectives, transfers.

Every time is the median of several runs, in whole nanoseconds, with the device idle before and
after each run. Nothing here changes what it measures: no gradient is accumulated.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

REPEATS = 5
WARMUP = 2


def synchronize() -> None:
    """Wait until the device has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ns(run: Callable[[], Any], before: Callable[[], Any] | None = None, repeats: int = REPEATS) -> int:
    """The median time of ``run``; ``before`` runs untimed each time, such as a barrier."""
    times = []
    for i in range(WARMUP + repeats):
        if before is not None:
            before()
        synchronize()
        start = time.perf_counter_ns()
        run()
        synchronize()
        if i >= WARMUP:
            times.append(time.perf_counter_ns() - start)
    return round(statistics.median(times))


class RegionTimer:
    """Answers the wrapped submodules of a layer and times each region, glue included.

    ``glue_before`` maps a region to the glue that runs since the region before it ended.
    """

    def __init__(self, glue_before: Mapping[str, str]) -> None:
        self._glue_before = glue_before
        self._times: dict[str, list[int]] = defaultdict(list)
        self._ended_ns = 0

    def parent(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A parent module runs: nothing to time."""
        return call(*args, **kwargs)

    def record(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Time one region."""
        synchronize()
        start = time.perf_counter_ns()
        if name in self._glue_before:
            self._times[self._glue_before[name]].append(start - self._ended_ns)
        out = call(*args, **kwargs)
        synchronize()
        self._ended_ns = time.perf_counter_ns()
        self._times[name].append(self._ended_ns - start)
        return out

    def medians_ns(self, skip: int = WARMUP) -> dict[str, int]:
        """The median time of each region; the first ``skip`` runs warm up."""
        return {name: round(statistics.median(times[skip:])) for name, times in self._times.items()}


def linear_ns(rows: int, weight: torch.Tensor) -> tuple[int, int, int]:
    """Forward, input-gradient and weight-gradient GEMM of a linear layer.

    ``weight`` is [out, in] as on this rank; the input is [rows, in].
    """
    out_size, in_size = weight.shape
    options = {"dtype": weight.dtype, "device": weight.device}
    rows_in = torch.ones(rows, in_size, **options)  # type: ignore[call-overload]
    grad = torch.ones(rows, out_size, **options)  # type: ignore[call-overload]
    with torch.no_grad():
        return (
            median_ns(lambda: rows_in.matmul(weight.t())),
            median_ns(lambda: grad.matmul(weight)),
            median_ns(lambda: grad.t().matmul(rows_in)),
        )


def all_reduce_ns(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Any) -> int:
    """An all-reduce of a tensor of ``size`` over ``group``."""
    tensor = torch.zeros(size, dtype=dtype, device=device)
    return median_ns(
        lambda: torch.distributed.all_reduce(tensor, group=group),
        before=lambda: torch.distributed.barrier(group=group),
    )


def gather_ns(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Any) -> tuple[int, int]:
    """An all-gather of shards into a tensor of ``size`` (first dimension split), and the
    reduce-scatter back."""
    whole = torch.zeros(size, dtype=dtype, device=device)
    shard = whole[: size[0] // group.size()].clone()
    barrier = {"before": lambda: torch.distributed.barrier(group=group)}
    return (
        median_ns(lambda: torch.distributed.all_gather_into_tensor(whole, shard, group=group), **barrier),
        median_ns(lambda: torch.distributed.reduce_scatter_tensor(shard, whole, group=group), **barrier),
    )
