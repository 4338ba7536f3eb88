"""One rank of the bench: ``python -m megatron_lynx.integration.benching.rank FOLDER``.

``FOLDER/request.json`` holds Megatron's arguments (``arguments``) and what to measure; the rank's
place comes from the environment, as under torchrun. ``lynx bench`` starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from megatron_lynx.errors import LynxError
from megatron_lynx.integration import pretrain
from megatron_lynx.integration.benching.turns import BenchFinished, bench_instead_of_training
from megatron_lynx.integration.cpu.backend import cpu_backend_active, cpu_backend_if_requested
from megatron_lynx.integration.cpu.dataset_helpers import shipped_dataset_helpers
from megatron_lynx.integration.cpu.norm import sequence_parallel_norm
from megatron_lynx.integration.install import install
from megatron_lynx.integration.windows import Hooks


def run(folder: Path) -> None:
    """Start Megatron's trainer and run the bench in it."""
    request: dict[str, Any] = json.loads((folder / "request.json").read_text())
    hooks = Hooks()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_backend_if_requested())
        stack.enter_context(sequence_parallel_norm())
        stack.enter_context(shipped_dataset_helpers())
        stack.enter_context(install(hooks))
        stack.enter_context(bench_instead_of_training(request, folder, hooks))
        stack.enter_context(contextlib.suppress(BenchFinished))
        pretrain.train(pretrain.parse([*request["arguments"], *_for_gpus()]))


def _for_gpus() -> list[str]:
    """More arguments where there are GPUs: NCCL where each rank has one of its own. NCCL refuses two
    ranks on one GPU: those share it and talk over gloo."""
    count = 0 if cpu_backend_active() else torch.cuda.device_count()
    if count >= int(os.environ["WORLD_SIZE"]):
        return ["--distributed-backend", "nccl"]
    if count:
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % count)
    return []


def _end_with(parent: int) -> None:
    """End this process when ``parent`` is gone: a bench that is killed outright must leave no ranks."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(3)


def main() -> int:
    """Run one rank; the exit code is 2 for what a user can mend."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        run(Path(sys.argv[1]))
    except LynxError as error:
        print(f"rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the trainer was left in the middle: no destructor may wait for the other ranks


if __name__ == "__main__":
    sys.exit(main())
