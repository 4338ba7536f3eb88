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
TURNS = 15
"""How often work alone and work beside a link's operation take turns: their ratio is noisy."""


def synchronize() -> None:
    """Wait until the device has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _finish_compute() -> None:
    """Wait for the stream that computes, but not for those of collectives."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def timed(run: Callable[[], Any], before: Callable[[], Any] | None = None) -> tuple[Any, int]:
    """What ``run`` returns and its time; ``before`` runs untimed, such as a barrier."""
    if before is not None:
        before()
    synchronize()
    start = time.perf_counter_ns()
    found = run()
    synchronize()
    return found, time.perf_counter_ns() - start


def median_ns(run: Callable[[], Any], before: Callable[[], Any] | None = None) -> int:
    """The median time of ``run``; ``before`` runs untimed each time."""
    times = [timed(run, before)[1] for _ in range(WARMUP + REPEATS)]
    return round(statistics.median(times[WARMUP:]))


class _Mark(torch.autograd.Function):
    """The identity; its backward says when the gradient of what it marks has arrived."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, arrived: Callable[[str], None]) -> torch.Tensor:
        """Pass ``tensor`` on."""
        ctx.name, ctx.arrived = name, arrived
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Note the moment."""
        ctx.arrived(ctx.name)
        return grads[0], None, None


def mark_tensors(value: Any, name: str, arrived: Callable[[str], None]) -> Any:
    """``value`` with every computed tensor in it marked: ``arrived(name)`` is called in the backward
    pass when its gradient is there. Parameters and constants stay as they are."""
    if isinstance(value, torch.Tensor):
        return value if value.grad_fn is None else _Mark.apply(value, name, arrived)
    if isinstance(value, tuple):
        return tuple(mark_tensors(item, name, arrived) for item in value)
    if isinstance(value, dict):
        return {key: mark_tensors(item, name, arrived) for key, item in value.items()}
    return value


class RegionTimer:
    """Answers the wrapped submodules of a layer and times each region, glue included, both ways.

    ``glue_before`` maps a region to the glue that runs since the region before it ended. In the
    backward pass a region has its time from the moment when the gradient of its output arrives to
    the moment when that of the region before it does. What runs inside a region (``region`` is the one
    that runs) has its own time forward, and shares the outer one's backward.
    """

    def __init__(self, glue_before: Mapping[str, str]) -> None:
        self._glue_before = glue_before
        self._forward: dict[str, list[int]] = defaultdict(list)
        self._backward: dict[str, list[int]] = defaultdict(list)
        self._ended_ns = 0
        self._inner_ns = 0
        self._region, self._since_ns = "", 0
        self.region = ""

    def parent(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A parent module runs: nothing to time."""
        return call(*args, **kwargs)

    def record(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Time one region."""
        glue = self._glue_before.get(name)
        if glue is not None:
            args, kwargs = self._marked(args, glue), self._marked(kwargs, glue)
        outer, self.region = self.region, name
        synchronize()
        start = time.perf_counter_ns()
        if glue is not None:
            self._forward[glue].append(start - self._ended_ns)
        self._inner_ns = 0
        out = call(*args, **kwargs)
        synchronize()
        end = time.perf_counter_ns()
        self._forward[name].append(end - start - self._inner_ns)
        self._inner_ns, self.region = end - start, outer
        out = self._marked(out, name)
        self._ended_ns = time.perf_counter_ns()
        return out

    def _marked(self, value: Any, name: str) -> Any:
        return mark_tensors(value, name, self._arrived)

    def _arrived(self, name: str) -> None:
        synchronize()
        now = time.perf_counter_ns()
        if name != self._region:
            self._leave(now)
            self._region = name
            self._since_ns = time.perf_counter_ns()

    def _leave(self, now_ns: int) -> None:
        if self._region:
            self._backward[self._region].append(now_ns - self._since_ns)
        self._region = ""

    def end_backward(self) -> None:
        """The layer's backward pass is over."""
        synchronize()
        self._leave(time.perf_counter_ns())

    def forward_ns(self, skip: int = WARMUP) -> dict[str, int]:
        """The median time of each region's forward; the first ``skip`` runs warm up."""
        return {name: round(statistics.median(times[skip:])) for name, times in self._forward.items()}

    def backward_ns(self, runs: int, skip: int = WARMUP) -> dict[str, int]:
        """The median time of each region's backward.

        A region is left and entered again where the engine runs something of another in between:
        ``runs`` is how many backward passes there were, to add such parts up.
        """
        found = {}
        for name, times in self._backward.items():
            parts = max(1, len(times) // runs)
            sums = [sum(times[i : i + parts]) for i in range(0, parts * runs, parts)]
            found[name] = round(statistics.median(sums[skip:]))
        return found


def wgrad_ns(rows: int, weight: torch.Tensor, bias: bool) -> int:
    """The weight-gradient GEMM of a linear layer, and the bias's gradient.

    ``weight`` is [out, in] as on this rank; the input is [rows, in].
    """
    out_size, in_size = weight.shape
    options = {"dtype": weight.dtype, "device": weight.device}
    # Random, as in training: a GPU draws less power for operands that are all alike, and runs faster.
    rows_in = torch.randn(rows, in_size, **options)  # type: ignore[call-overload]
    grad = torch.randn(rows, out_size, **options)  # type: ignore[call-overload]

    def run() -> None:
        grad.t().matmul(rows_in)
        if bias:
            grad.sum(dim=0)

    with torch.no_grad():
        return median_ns(run)


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

    def barrier() -> None:
        torch.distributed.barrier(group=group)

    return (
        median_ns(lambda: torch.distributed.all_gather_into_tensor(whole, shard, group=group), barrier),
        median_ns(lambda: torch.distributed.reduce_scatter_tensor(shard, whole, group=group), barrier),
    )


def side_by_side(
    launch: Callable[[], Any], work: Callable[[], Any], alone_ns: int, barrier: Callable[[], Any]
) -> tuple[float, int]:
    """An operation on a link with compute beside it: how much longer the compute takes, and how
    long the operation.

    ``launch`` starts the operation and returns its handle; ``work`` is a short piece of compute,
    repeated until it fills about two thirds of ``alone_ns``, the operation's time alone.
    """
    one_ns = max(1, median_ns(work))
    count = max(1, round(alone_ns * 2 / 3 / one_ns))

    def fill() -> None:
        for _ in range(count):
            work()

    fills, works, wholes = [], [], []
    for _ in range(WARMUP + TURNS):
        fills.append(timed(fill, barrier)[1])
        barrier()
        synchronize()
        start = time.perf_counter_ns()
        handle = launch()
        fill()
        _finish_compute()
        works.append(time.perf_counter_ns() - start)
        handle.wait()
        synchronize()
        wholes.append(time.perf_counter_ns() - start)
    fill_ns, beside_ns, whole_ns = (statistics.median(times[WARMUP:]) for times in (fills, works, wholes))
    hidden = beside_ns < whole_ns * 0.95
    return max(1.0, beside_ns / fill_ns), round(max(alone_ns, whole_ns if hidden else alone_ns))


def transfer_ns(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Any) -> int:
    """One transfer of a tensor of ``size`` between neighbours of ``group``: half of a round trip.

    Ranks 0 and 1, 2 and 3, and so on measure at the same time; the last of an odd number waits. Only the
    one that begins knows when the round trip is over: all others return 0.
    """
    tensor = torch.zeros(size, dtype=dtype, device=device)
    me = torch.distributed.get_rank(group=group)
    other = me ^ 1
    if other >= group.size():
        for _ in range(WARMUP + REPEATS):
            torch.distributed.barrier(group=group)
        return 0
    peer = torch.distributed.get_global_rank(group, other)

    def round_trip() -> None:
        if me < other:
            torch.distributed.send(tensor, dst=peer, group=group)
            torch.distributed.recv(tensor, src=peer, group=group)
        else:
            torch.distributed.recv(tensor, src=peer, group=group)
            torch.distributed.send(tensor, dst=peer, group=group)

    both_ns = median_ns(round_trip, before=lambda: torch.distributed.barrier(group=group))
    return both_ns // 2 if me < other else 0
