"""Writes what each training step did, one JSON line per step and rank: loss, time, activation bytes.

Megatron's log rounds the loss to six digits, and its timers include the log. For a comparison of
methods to the last bit, ``MEGATRON_LYNX_RECORD=DIR`` makes the trainer write ``DIR/rank<N>.jsonl``:

    {"iteration": 2, "loss": 5.546875, "step_ns": 812345678, "peak_bytes": 123456789}

``loss`` is null on ranks without the last pipeline stage; ``peak_bytes`` is null but in the second
step of the process, which runs under the storage meter and is therefore slower than the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.training import training

from megatron_lynx.profiler.meter import StorageMeter

ENVIRONMENT_VARIABLE = "MEGATRON_LYNX_RECORD"

# The first step also allocates what lives for the whole run, such as shared gather buffers.
METERED_STEP = 2


@contextlib.contextmanager
def recorder_if_requested() -> Iterator[None]:
    """Record every step of Megatron's trainer where ``MEGATRON_LYNX_RECORD`` names a folder."""
    folder = os.environ.get(ENVIRONMENT_VARIABLE)
    if not folder:
        yield
        return
    path = Path(folder) / f"rank{os.environ.get('RANK', '0')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    original = training.train_step
    with path.open("a") as file:
        training.train_step = _recorded(original, file)
        try:
            yield
        finally:
            training.train_step = original


def _recorded(train_step: Callable[..., Any], file: Any) -> Callable[..., Any]:
    """``train_step`` with a line in ``file`` for each call."""
    steps = 0

    def recorded_train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        config: Any,
        forward_backward_func: Callable[..., Any],
        iteration: int | None = None,
        **more: Any,
    ) -> Any:
        nonlocal steps
        steps += 1
        meter = StorageMeter() if steps == METERED_STEP else None
        if meter is not None:
            forward_backward_func = _metered(forward_backward_func, meter)
        torch.cuda.synchronize()
        start_ns = time.perf_counter_ns()
        result = train_step(
            forward_step_func,
            data_iterator,
            model,
            optimizer,
            scheduler,
            config,
            forward_backward_func,
            iteration=iteration,
            **more,
        )
        torch.cuda.synchronize()
        step_ns = time.perf_counter_ns() - start_ns
        loss = result[0].get("lm loss")
        line = {
            "iteration": iteration + 1 if iteration is not None else steps,
            "loss": None if loss is None else float(loss),
            "step_ns": step_ns,
            "peak_bytes": None if meter is None else meter.peak_bytes,
        }
        file.write(json.dumps(line) + "\n")
        file.flush()
        return result

    return recorded_train_step


def _metered(function: Callable[..., Any], meter: StorageMeter) -> Callable[..., Any]:
    def metered(*args: Any, **kwargs: Any) -> Any:
        with meter:
            return function(*args, **kwargs)

    return metered
