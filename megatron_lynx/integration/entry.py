"""What surrounds a run of Megatron's trainer, whichever way in: one context for all of them."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator

from megatron_lynx.integration.cpu.backend import cpu_backend_if_requested
from megatron_lynx.integration.cpu.dataset_helpers import shipped_dataset_helpers
from megatron_lynx.integration.cpu.norm import sequence_parallel_norm
from megatron_lynx.integration.cpu.optimizer_state import loadable_optimizer_state
from megatron_lynx.integration.recorder import recorder_if_requested
from megatron_lynx.integration.trainer import lynx_trainer


@contextlib.contextmanager
def megatron_run() -> Iterator[None]:
    """Until the block ends: the CPU backend and the recorder where the environment asks for them,
    what Megatron's wheel lacks, and ``--recompute-method lynx``.

    Enter it before Megatron's arguments are parsed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_backend_if_requested())
        stack.enter_context(sequence_parallel_norm())
        stack.enter_context(shipped_dataset_helpers())
        stack.enter_context(loadable_optimizer_state())
        stack.enter_context(recorder_if_requested())
        stack.enter_context(lynx_trainer())
        yield


def enter() -> None:
    """``megatron_run()`` until the process ends: what a patched upstream script calls (``patches/``)."""
    stack = contextlib.ExitStack()
    stack.enter_context(megatron_run())
    atexit.register(stack.close)
