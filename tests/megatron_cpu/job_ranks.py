"""Runs inside ranks: jobs of Megatron's trainer one after the other, each in processes of its own and on as
many ranks as it needs, as a cluster would start them; one may lose a rank."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import inspect
import os
import queue
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.megatron_cpu.fault_ranks import hashed

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class TrainingJob:
    """A command line of the trainer on the first ``ranks`` ranks.

    ``folder`` is where its losses go, and the errors of its ranks. The last rank is killed in the middle of
    its step ``killed_in``, after the first of that step's microbatches. With ``only_parsed`` the first rank
    reads the command line, as all would, and nothing is trained.
    """

    folder: Path
    argv: tuple[str, ...]
    ranks: int
    killed_in: int | None = None
    only_parsed: bool = False

    def runs_on(self, rank: int) -> bool:
        """Whether this rank takes part."""
        return rank < (1 if self.only_parsed else self.ranks)


def run_jobs(rank: int, world_size: int, payload: list[TrainingJob]) -> list[str]:
    """Run every job; returns for each how it ended on this rank: "" if it trained, else the error's type and
    text, or the signal that ended it."""
    import torch

    _prepared()
    found = [
        _in_a_process(rank, job.folder, partial(_train, rank, job)) if job.runs_on(rank) else ""
        for job in payload
    ]
    meet = f"file://{payload[0].folder.parent / 'met'}"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size)
    return found


def _prepared() -> None:
    """What takes seconds and every job would do anew: imports; reading Megatron's source for the help of its
    flags; a process that imports torch to hand the names of written files on to the one that wrote them. And
    an end to the launcher's threads, which would not be there in a process that is forked."""
    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import arguments, checkpointing, training  # noqa: F401

    from megatron_lynx.integration import pretrain, recorder, trainer  # noqa: F401

    torch.distributed.barrier()  # all are connected: none is left by a peer while it still connects
    torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    filesystem_async._results_queue = queue.Queue()
    inspect.getsource = functools.cache(inspect.getsource)
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _in_a_process(rank: int, folder: Path, work: Callable[[], None]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    error = folder / f"error.{rank}"
    pid = os.fork()
    if pid == 0:
        try:
            with (folder / f"log.{rank}").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                work()
                sys.stdout.flush()
        except BaseException as found:
            error.write_text(f"{type(found).__name__}: {found}")
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return error.read_text() if error.exists() else ""


def _train(rank: int, job: TrainingJob) -> None:
    import torch

    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.cpu.optimizer_state import loadable_optimizer_state
    from megatron_lynx.integration.recorder import ENVIRONMENT_VARIABLE, recorder_if_requested
    from megatron_lynx.integration.trainer import lynx_trainer

    os.environ |= {"WORLD_SIZE": str(job.ranks), ENVIRONMENT_VARIABLE: str(job.folder)}
    dies = job.killed_in is not None and rank == job.ranks - 1
    with (
        contextlib.suppress(SystemExit),  # --exit-interval
        _killed_in(job.killed_in or 0) if dies else contextlib.nullcontext(),
        loadable_optimizer_state(),
        recorder_if_requested(),
        lynx_trainer(),
    ):
        args = pretrain.parse(job.argv)
        if job.only_parsed:
            return
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{job.folder / 'rendezvous'}",
            rank=rank,
            world_size=job.ranks,
            timeout=TIMEOUT,
        )
        pretrain.train(args)


@contextlib.contextmanager
def _killed_in(step: int) -> Iterator[None]:
    """Let this process be killed in that step, at the second of its microbatches."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from megatron_lynx.integration import pretrain

    original, calls = pretrain.forward_step, 0

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (step - 1) * get_num_microbatches() + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with mock.patch.object(pretrain, "forward_step", forward_step):
        yield


@dataclass(frozen=True)
class ScriptRun:
    """A script as a launcher starts it: its path and arguments, or ``lynx run`` before them.

    ``folder`` is where its losses go, its gradients (a hash a step), and the errors of its ranks.
    """

    folder: Path
    words: tuple[str, ...]


def run_scripts(rank: int, world_size: int, payload: list[ScriptRun]) -> list[str]:
    """Run every script on all ranks; returns how each ended on this rank, as ``run_jobs`` does."""
    import torch

    _prepared()
    found = [_in_a_process(rank, run.folder, partial(_script, rank, world_size, run)) for run in payload]
    meet = f"file://{payload[0].folder.parent / 'met'}"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size)
    return found


def _script(rank: int, world_size: int, run: ScriptRun) -> None:
    import torch
    from megatron.training import training

    from megatron_lynx.cli.main import main
    from megatron_lynx.integration.recorder import ENVIRONMENT_VARIABLE

    os.environ[ENVIRONMENT_VARIABLE] = str(run.folder)
    del os.environ["MEGATRON_LYNX_CPU"]  # this process has entered the backend already
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{run.folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    gradients: list[str] = []
    through_lynx = run.words[0] == "lynx"
    sys.argv = [*run.words]
    try:
        with mock.patch.object(training, "finalize_model_grads", hashed(gradients)):
            if through_lynx:
                sys.exit(main(run.words[1:]))
            sys.path.insert(0, str(Path(run.words[0]).parent))
            runpy.run_path(run.words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        (run.folder / f"gradients.{rank}").write_text("\n".join(gradients))
