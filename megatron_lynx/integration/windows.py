"""Where Megatron waits for a link: the collectives and transfers that open windows.

Each function here wraps one primitive that Megatron calls. It launches the same operation, lets
the executor work, then waits: on the same stream, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_lynx.plan import Window
from megatron_lynx.runtime.executor import Executor


class Hooks:
    """What the replaced functions look at: the executor, or None while no plan is bound.

    ``watcher`` is the executor, or whoever else watches the parts of layers (``binding.Watcher``).
    """

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.watcher: Any = None


class WindowWork:
    """A handle of a launched operation whose ``wait`` first does what is due in its window."""

    def __init__(self, work: Any, executor: Executor, window: Window) -> None:
        self._work = work
        self._executor = executor
        self._window: Window | None = window

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Do what is due, once, then wait."""
        window, self._window = self._window, None
        if window is None:
            return self._work.wait(*args, **kwargs)
        return self._executor.pass_window(window, lambda: self._work.wait(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def windowed_collective(original: Callable[..., Any], hooks: Hooks) -> Callable[..., Any]:
    """A collective that opens a window if it is one of a layer's own.

    A synchronous call becomes a launch, the work, and a wait.
    """

    def collective(*args: Any, **kwargs: Any) -> Any:
        executor = hooks.executor
        if executor is None:
            return original(*args, **kwargs)
        asynchronous = bool(kwargs.get("async_op", False))
        window = executor.collective_window(kwargs.get("group"), asynchronous=asynchronous)
        if window is None or not executor.is_due(window):
            return original(*args, **kwargs)
        work = WindowWork(original(*args, **{**kwargs, "async_op": True}), executor, window)
        if asynchronous:
            return work
        work.wait()
        return None

    return collective


def watched_inside(names: Mapping[str, str]) -> Callable[..., Any]:
    """How a function is replaced that runs inside parts of a layer: ``names`` has, by the part that it runs
    inside of, the name of what it is there."""

    def replace(original: Callable[..., Any], hooks: Hooks) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            active = None if hooks.watcher is None else hooks.watcher.active
            if active is None or active.region not in names:
                return original(*args, **kwargs)
            return active.record(names[active.region], original, args, kwargs)

        return run

    return replace


def windowed_batched_p2p(original: Callable[..., Any], hooks: Hooks) -> Callable[..., Any]:
    """``_batched_p2p_ops``: a list of handles, waited for in turn; the first wait opens the stall."""

    def batched_p2p(**kwargs: Any) -> Any:
        works = original(**kwargs)
        executor = hooks.executor
        window = _stall(executor, kwargs)
        if executor is None or window is None or not works:
            return works
        return [WindowWork(works[0], executor, window), *works[1:]]

    return batched_p2p


def windowed_p2p(original: Callable[..., Any], hooks: Hooks) -> Callable[..., Any]:
    """``_p2p_ops``: handles by direction; waiting for a gradient opens the stall."""

    def p2p(**kwargs: Any) -> Any:
        works = original(**kwargs)
        executor = hooks.executor
        window = _stall(executor, kwargs)
        if executor is None or window is None or "recv_next" not in works:
            return works
        return {**works, "recv_next": WindowWork(works["recv_next"], executor, window)}

    return p2p


def windowed_shapes(original: Any, hooks: Hooks) -> Any:
    """A subclass of the pipeline's communicator ``original``. Where lengths vary, ranks exchange shapes
    before they transfer anything, and wait for the next stage there: that wait opens the stall."""
    distributed: Any = torch.distributed

    class WindowedCommunicator(original):
        """``original``, with a stall where it waits for the shape of a gradient."""

        def _communicate_shapes(self, *args: Any, **kwargs: Any) -> Any:
            executor = hooks.executor
            awaited = kwargs["recv_next"] if "recv_next" in kwargs else args[3]
            window = executor.stall_window() if executor is not None and awaited else None
            if executor is None or window is None:
                return super()._communicate_shapes(*args, **kwargs)
            launch = distributed.batch_isend_irecv

            def launched(operations: Any) -> Any:
                works = launch(operations)
                return [WindowWork(works[0], executor, window), *works[1:]] if works else works

            distributed.batch_isend_irecv = launched
            try:
                return super()._communicate_shapes(*args, **kwargs)
            finally:
                distributed.batch_isend_irecv = launch

    WindowedCommunicator.__name__ = WindowedCommunicator.__qualname__ = original.__name__
    return WindowedCommunicator


def _stall(executor: Executor | None, transfer: dict[str, Any]) -> Window | None:
    """The stall window of a transfer that receives a gradient."""
    if executor is None or transfer.get("tensor_recv_next") is None:
        return None
    return executor.stall_window()


def in_step(schedule: Callable[..., Any], begin: Callable[[int], Any]) -> Callable[..., Any]:
    """``schedule`` run as one step; ``begin`` makes the context from the number of microbatches."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("forward_only"):
            return schedule(*args, **kwargs)
        with begin(int(kwargs["num_microbatches"])):
            return schedule(*args, **kwargs)

    return run
