"""What surrounds a run of Megatron's trainer, whichever way in: one context for all of them."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from megatron_lynx.errors import LynxError
from megatron_lynx.integration.versions import require_megatron

_running = False


@contextlib.contextmanager
def megatron_run() -> Iterator[None]:
    """Until the block ends: the CPU backend and the recorder where the environment asks for them,
    what Megatron's wheel lacks, and ``--recompute-method lynx``.

    Enter it before Megatron's arguments are parsed. Inside another such block it does nothing: a
    patched script may be run by ``lynx run``.

    Raises:
        InstallError: torch or Megatron is missing or broken; says which and where.
    """
    global _running
    if _running:
        yield
        return
    require_megatron(trainer=True)
    # Imported now: all of these import Megatron.
    from megatron_lynx.integration.cpu.backend import cpu_backend_if_requested
    from megatron_lynx.integration.cpu.dataset_helpers import shipped_dataset_helpers
    from megatron_lynx.integration.cpu.norm import sequence_parallel_norm
    from megatron_lynx.integration.cpu.optimizer_state import loadable_optimizer_state
    from megatron_lynx.integration.recorder import recorder_if_requested
    from megatron_lynx.integration.trainer import lynx_trainer

    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_backend_if_requested())
        stack.enter_context(sequence_parallel_norm())
        stack.enter_context(shipped_dataset_helpers())
        stack.enter_context(loadable_optimizer_state())
        stack.enter_context(recorder_if_requested())
        stack.enter_context(lynx_trainer())
        _running = True
        try:
            yield
        finally:
            _running = False


def enter() -> None:
    """``megatron_run()`` until the process ends: what a patched upstream script calls (``patches/``).

    An error that a user can mend leaves as one line, with exit code 2.
    """
    if _running:
        return
    _errors_in_one_line()
    stack = contextlib.ExitStack()
    stack.enter_context(megatron_run())
    atexit.register(stack.close)


def _errors_in_one_line() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, LynxError):
            before(kind, error, traceback)
            return
        line = " ".join(str(error).split())
        # Not sys.stderr: torch.distributed collects that while it calls this, and loses it at an exit.
        sys.stdout.flush()
        os.write(2, f"{Path(sys.argv[0]).name}: error: {line}\n".encode())
        os._exit(2)

    sys.excepthook = hook
