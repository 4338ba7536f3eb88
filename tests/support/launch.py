"""Run a function of a test file on several gloo ranks, each a process with Megatron on the CPU backend.

    results = run_ranks(2, "tests.megatron_cpu.test_cpu_backend:train", payload, timeout_s=120)

``train(rank, world_size, payload)`` runs once in each rank, with ``torch.distributed`` initialised
and ``cpu_backend()`` active; what it returns comes back in a list, by rank. Starting costs seconds
(torch and Megatron are imported once, then the ranks are forked), so put many configurations
into one payload and loop over them inside the target.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support import te_reference

REPOSITORY = Path(__file__).resolve().parents[2]

# A rank that lost its peer waits in a collective until the timeout: it gets this long to fail by itself.
_GRACE_S = 3.0
_STACKS_BEFORE_END_S = 8.0
_LOG_TAIL_CHARACTERS = 8000


class RanksFailedError(AssertionError):
    """A rank raised, died or ran out of time; the message has every rank's traceback or last output."""


def run_ranks(
    world_size: int,
    target: str,
    payload: object = None,
    timeout_s: int = 300,
    *,
    megatron: Path | None = None,
    te: bool | str = False,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``target`` ("module:function") on ``world_size`` ranks; returns what each returned, by rank.

    Payload and results travel by pickle. ``timeout_s`` bounds the whole launch, imports included.
    ``megatron`` is a folder with another Megatron than the one that is installed. ``te`` gives the
    ranks Transformer Engine over ``tests.support.te_reference``: True for the version that megatron-core
    names, or another one. ``env`` adds variables.
    """
    with tempfile.TemporaryDirectory(prefix="lynx-ranks-") as name:
        folder = Path(name)
        (folder / "payload").write_bytes(pickle.dumps(payload))
        with (folder / "log").open("wb") as log:
            launcher = subprocess.Popen(
                [sys.executable, "-m", "tests.support.launch", name, str(world_size), target, str(timeout_s)],
                cwd=REPOSITORY,
                env={**_environment(megatron, te), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                launcher.wait(timeout=timeout_s)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                # The ranks share the launcher's process group, so none is left behind.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
        results = [folder / f"result.{rank}" for rank in range(world_size)]
        if launcher.returncode == 0 and all(path.exists() for path in results):
            return [pickle.loads(path.read_bytes()) for path in results]
        reason = f"ran longer than {timeout_s} s" if timed_out else "failed"
        raise RanksFailedError(f"{target} on {world_size} ranks {reason}\n{_report(folder, world_size)}")


def _environment(megatron: Path | None, te: bool | str) -> dict[str, str]:
    version = te_reference.DEFAULT_VERSION if te is True else te
    folders = [
        *(te_reference.folders(version) if version else []),
        REPOSITORY,
        *([megatron] if megatron else []),
    ]
    path = [*(str(folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "MEGATRON_LYNX_CPU": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def _report(folder: Path, world_size: int) -> str:
    parts = []
    for rank in range(world_size):
        error = folder / f"error.{rank}"
        if error.exists():
            parts.append(f"--- rank {rank}\n{error.read_text()}")
        elif not (folder / f"result.{rank}").exists():
            parts.append(f"--- rank {rank}: neither a result nor an error (ended, or stuck in a collective)")
    tail = (folder / "log").read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]
    return "\n".join([*parts, f"--- last output\n{tail}"])


# --- in the launcher's process -------------------------------------------------------------------


def _launch(folder: Path, world_size: int, target: str, timeout_s: int) -> int:
    """Import once, fork the ranks, wait for them; returns the exit code."""
    end = time.monotonic() + timeout_s
    import torch

    # The slow import, shared by the forked ranks. The wheels of megatron-core 0.16 have no trainer.
    trainer = importlib.util.find_spec("megatron.training")
    importlib.import_module("megatron.training" if trainer else "megatron.core")

    torch.set_num_threads(1)
    # Megatron writes a page for every model at INFO; the log is read for its end only.
    logging.getLogger().setLevel(logging.WARNING)
    sys.stdout.flush()
    children: dict[int, int] = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os._exit(_rank_main(folder, rank, world_size, target, timeout_s, end))
        children[pid] = rank
    failed = False
    deadline = float("inf")
    while children and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.02)
            continue
        children.pop(pid, None)
        if status != 0 and not failed:
            failed, deadline = True, time.monotonic() + _GRACE_S
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    return 1 if failed else 0


def _rank_main(folder: Path, rank: int, world_size: int, target: str, timeout_s: int, deadline: float) -> int:
    # Stuck ranks say where: shortly before the launch is ended, each writes its stack into the log.
    faulthandler.dump_traceback_later(max(1.0, deadline - time.monotonic() - _STACKS_BEFORE_END_S))
    try:
        result = _run_target(folder, rank, world_size, target, timeout_s)
        partial = folder / f"partial.{rank}"
        partial.write_bytes(pickle.dumps(result))
        partial.rename(folder / f"result.{rank}")
        return 0
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _run_target(folder: Path, rank: int, world_size: int, target: str, timeout_s: int) -> object:
    import torch

    from megatron_lynx.integration.cpu.backend import cpu_backend

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    module, _, function = target.partition(":")
    payload = pickle.loads((folder / "payload").read_bytes())
    with cpu_backend():
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = getattr(importlib.import_module(module), function)(rank, world_size, payload)
        torch.distributed.barrier()  # a rank that ends early would break its peers' last collective
        torch.distributed.destroy_process_group()
    return result


if __name__ == "__main__":
    sys.exit(_launch(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
