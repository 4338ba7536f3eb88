"""Trains one small GPT with each recomputation method, and compares them in one table.

Two ranks with tensor parallelism, real Megatron, real text. On CPUs they train over gloo: on two
hosts made of network namespaces, joined by a cable of 400 Mbit/s, where that can be had (root and
iproute2), else side by side over the loopback, where collectives are too quick to leave windows. On
a machine with two GPUs they train over NCCL (untested). Everything is written below ``.quickstart``.

    python scripts/quickstart.py [--iterations 20] [--methods none,full,selective,lynx]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_lynx.cli.hosts import LocalHosts, TwoHosts, two_hosts, why_not
from megatron_lynx.errors import ConfigError

RANKS = 2
RATE = "400mbit"

# Megatron's flags by method; "{report}" stands for a folder of the method's own.
METHODS: dict[str, tuple[str, ...]] = {
    "none": (),
    "full": (
        *("--recompute-granularity", "full"),
        *("--recompute-method", "uniform"),
        *("--recompute-num-layers", "1"),
    ),
    "selective": ("--recompute-granularity", "selective"),
    "lynx": ("--recompute-method", "lynx", "--lynx-report", "{report}"),
}

# A GPT that two cores train in about a second per step.
MODEL = (
    *("--num-layers", "4"),
    *("--hidden-size", "256"),
    *("--num-attention-heads", "8"),
    *("--seq-length", "256"),
    *("--max-position-embeddings", "256"),
    *("--tensor-model-parallel-size", str(RANKS)),
    *("--micro-batch-size", "2"),
    *("--global-batch-size", "8"),
    *("--lr", "1e-3"),
    *("--lr-decay-style", "constant"),
    *("--seed", "1234"),
    # No evaluation: the loss of training is compared.
    *("--eval-iters", "0"),
    *("--log-interval", "1"),
    # What works from Megatron's wheel alone, without Transformer Engine and Apex.
    *("--transformer-impl", "local"),
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
)

# Steps that are not timed: the first warms up, the second runs under the storage meter.
UNTIMED_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one method did. ``rebuilds`` are counts in windows, in stalls and on demand, over all ranks."""

    method: str
    loss: float
    step_ns: int
    peak_bytes: int
    rebuilds: tuple[int, int, int] | None


def main() -> int:
    """Train with every method; the exit code is 1 if a run failed or two losses differ."""
    parser = argparse.ArgumentParser(description="Compare recomputation methods on a small GPT.")
    parser.add_argument("--iterations", type=int, default=20, help="training steps for each method")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated, of: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path(".quickstart"), help="where to write")
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    for method in methods:
        if method not in METHODS:
            parser.error(f"--methods {method}: expected some of {','.join(METHODS)}")
    if arguments.iterations <= UNTIMED_STEPS:
        parser.error(f"--iterations {arguments.iterations}: expected more than {UNTIMED_STEPS}, such as 20")
    folder: Path = arguments.folder.resolve()
    # Written into a file, the table must not be cut to the 80 columns that rich assumes there.
    console = Console() if sys.stdout.isatty() else Console(width=100)
    device = _device()
    flags = [*MODEL, *device.flags, *_dataset(folder), "--train-iters", str(arguments.iterations)]
    results = []
    with _hosts(device) as hosts, _progress(console) as progress:
        console.print(f"{RANKS} ranks, tensor parallel, on {device.name}, {hosts.link}; see {folder}")
        for method in methods:
            task = progress.add_task(method, total=arguments.iterations, loss="")
            run = folder / method
            if not _train(run, method, flags, device, hosts, partial(progress.update, task)):
                progress.stop()
                console.print(f"{method} failed; the end of its log:\n{_tail(run)}")
                return 1
            results.append(_result(run, method))
    console.print(_table(results))
    return _verdict(console, results, folder)


# --- where to train ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the ranks run on: a name to show, Megatron's flags, and the ranks' environment."""

    name: str
    gpu: bool
    flags: tuple[str, ...]
    environment: dict[str, str]


def _device() -> Device:
    import torch

    gpus = torch.cuda.device_count()
    common = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    if gpus >= RANKS:
        return Device(
            name=f"{RANKS} of {gpus} GPUs over NCCL (untested)",
            gpu=True,
            flags=("--distributed-backend", "nccl"),
            environment=common,
        )
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    return Device(
        name="CPUs over gloo",
        gpu=False,
        flags=("--distributed-backend", "gloo"),
        # One GPU cannot hold two NCCL ranks, and the CPU backend refuses to hide it by itself.
        environment={
            **common,
            "MEGATRON_LYNX_CPU": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": threads,
        },
    )


def _hosts(device: Device) -> contextlib.AbstractContextManager[LocalHosts | TwoHosts]:
    """Where the ranks run: apart, with a cable between them, if this machine can do it."""
    if device.gpu or why_not() is not None:
        return contextlib.nullcontext(LocalHosts())
    return _cabled()


@contextlib.contextmanager
def _cabled() -> Iterator[LocalHosts | TwoHosts]:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
            hosts.set_rate(RATE)
        except ConfigError:  # root in a container may still not be allowed to
            yield LocalHosts()
            return
        yield hosts


def _dataset(folder: Path) -> list[str]:
    # torch and Megatron tell what is not installed; nothing here needs it.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
    prefix = build_dataset(folder / "data" / "python_stdlib")
    return [*dataset_arguments(prefix), "--data-cache-path", str(folder / "data" / "cache")]


# --- one method ----------------------------------------------------------------------------------


def _train(
    run: Path,
    method: str,
    flags: list[str],
    device: Device,
    hosts: LocalHosts | TwoHosts,
    show: Callable[..., None],
) -> bool:
    """Train with ``method`` in the folder ``run``, showing each step; whether it ended well."""
    shutil.rmtree(run, ignore_errors=True)
    report, record = run / "report", run / "record"
    report.mkdir(parents=True)
    own_flags = [flag.format(report=report) for flag in METHODS[method]]
    own = [sys.executable, "-m", "megatron_lynx.pretrain_gpt", *flags, *own_flags]
    common = {**os.environ, **device.environment, **hosts.environment(), "WORLD_SIZE": str(RANKS)}
    common["MEGATRON_LYNX_RECORD"] = str(record)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            with (run / f"log.{rank}.txt").open("wb") as log:
                process = subprocess.Popen(
                    [*hosts.command(rank), *own],
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            ranks.append(process)
        while True:
            time.sleep(0.3)
            ended = [process.poll() for process in ranks]
            steps = _steps(record / f"rank{RANKS - 1}.jsonl")
            if steps:
                show(completed=len(steps), loss=f"loss {steps[-1]['loss']:.4f}")
            if any(code not in (None, 0) for code in ended):
                return False
            if all(code == 0 for code in ended):
                return True
    finally:
        for process in ranks:  # a rank that lost its peer waits for ever
            if process.poll() is None:
                process.kill()
            process.wait()


def _steps(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a recorder's file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _result(run: Path, method: str) -> Result:
    ranks = [_steps(run / "record" / f"rank{rank}.jsonl") for rank in range(RANKS)]
    last = ranks[-1]
    return Result(
        method=method,
        loss=last[-1]["loss"],
        step_ns=int(statistics.median(step["step_ns"] for step in last[UNTIMED_STEPS:])),
        peak_bytes=max(step["peak_bytes"] or 0 for steps in ranks for step in steps),
        rebuilds=_rebuilds(run / "report"),
    )


def _rebuilds(report: Path) -> tuple[int, int, int] | None:
    """Storages rebuilt in collectives' windows, in stalls and on demand, over all ranks and steps.

    Read from what ``--lynx-report`` wrote; None if there is nothing.
    """
    counts: Counter[str] = Counter()
    for path in report.glob("steps.*.jsonl"):
        for step in _steps(path):
            counts.update(step["rebuilt_storages"])
    if not counts:
        return None
    return sum(counts[kind] for kind in ("fwd", "bwd", "head")), counts["stall"], counts["demand"]


# --- what is shown -------------------------------------------------------------------------------


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    )


def _table(results: list[Result]) -> Table:
    table = Table(
        title="One GPT, the same data and seed, by recomputation method",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for column in (
        "loss\nat the end",
        "step\n(ms)",
        "activation\npeak (B)",
        "rebuilt in\nwindows",
        "in\nstalls",
        "on\ndemand",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        rebuilds = ["-"] * 3 if result.rebuilds is None else [str(count) for count in result.rebuilds]
        table.add_row(
            result.method,
            repr(result.loss),
            f"{result.step_ns / 1e6:.0f}",
            f"{result.peak_bytes:,}",
            *rebuilds,
        )
    return table


def _verdict(console: Console, results: list[Result], folder: Path) -> int:
    console.print(f"Logs, steps and reports by method: {folder}")
    if len({result.loss for result in results}) > 1:
        console.print("The losses DIFFER: a method changed what is computed.")
        return 1
    console.print("The losses are equal to the last bit.")
    for result in results:
        if result.rebuilds and sum(result.rebuilds):
            waits, total = sum(result.rebuilds[:2]), sum(result.rebuilds)
            share = 100 * waits / total
            console.print(
                f"{result.method} rebuilt {waits} of {total} storages inside waits ({share:.1f} %)."
            )
    _page(console, folder)
    return 0


def _page(console: Console, folder: Path) -> None:
    """The lynx run as a page: planned beside measured."""
    report, page = folder / "lynx" / "report", folder / "lynx.html"
    if report.is_dir() and any(report.iterdir()):
        command = [sys.executable, "-m", "megatron_lynx", "report", str(report), "--html", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        console.print(f"What lynx planned, beside what it did: {page}")


def _tail(run: Path, lines: int = 30) -> str:
    """The end of the log of the rank that failed first: the one with the shorter log is the other."""
    logs = [(run / f"log.{rank}.txt").read_text(errors="replace").splitlines() for rank in range(RANKS)]
    return "\n".join(max(logs, key=len)[-lines:])


if __name__ == "__main__":
    sys.exit(main())
