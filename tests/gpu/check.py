"""What only a GPU can show, on one device: NOT RUN ON A GPU YET, only its rehearsal on a CPU.

    python -m tests.gpu.check FOLDER            # on the first CUDA device; a few minutes
    MEGATRON_LYNX_CPU=1 python -m tests.gpu.check FOLDER --tiny    # its rehearsal

Megatron's own trainer trains a small GPT with local layers and, where Transformer Engine is installed,
with its layers under each of its attentions: twice as it is, with Megatron's full recomputation, and
under five plans of lynx. Every run is one line of ``FOLDER/rows.jsonl``: losses and hashes of gradients
by step; time of the schedule by the device's events and by the host, which ends when the last kernel is
queued; the peak of a step above what it began with, planned and measured, and what the allocator
reserved; what a microbatch keeps, planned and measured; what was rebuilt in windows and on demand.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

STEPS = 5
COUNTED_FROM = 2
"""The first steps allocate, compile and warm up."""
SECONDS = 330
"""After so long no further run begins: the whole check is made to fit into eight minutes."""

PLANNERS = ("none", "selective", "full-uniform-1", "tail-free", "windows")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
BIG = {"layers": 4, "hidden": 2048, "heads": 16, "sequence": 2048, "vocabulary": 8192}
TINY = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 100}
OVERLAPPED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
LLAMA = (
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--group-query-attention", "--num-query-groups", "2"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """A model and how it is trained; ``flags`` come after those that all jobs have."""

    name: str
    flags: tuple[str, ...]
    planners: tuple[str, ...] = PLANNERS


@dataclass(slots=True)
class Row:
    """One run. Times are in ns of one step, medians over those that count; sizes in bytes.

    ``plan`` is ``stock``, ``stock again``, ``stock full`` or a planner; ``error`` what ended it early.
    """

    job: str
    plan: str
    error: str = ""
    losses: list[float] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    device_ns: int = 0
    host_ns: int = 0
    activation_peak_bytes: int = 0
    planned_peak_bytes: int = 0
    reserved_bytes: int = 0
    kept_bytes: int = 0
    planned_kept_bytes: int = 0
    rebuilt_in_windows_ns: int = 0
    rebuilt_on_demand_ns: int = 0


def jobs(on_gpu: bool) -> list[Job]:
    """What is trained: local layers always, TE's where they are installed and lynx takes them."""
    from megatron_lynx.integration.refusals import REFUSALS

    taken = all("transformer_engine" in row.allowed for row in REFUSALS if "transformer_impl" in row.fields)
    local = ["--transformer-impl", "local", "--no-persist-layer-norm"]
    if not on_gpu or find_spec("apex") is None:
        local += ["--no-masked-softmax-fusion"]
    found = [
        Job("local", tuple(local)),
        Job("local, gradients reduced beside", (*local, *OVERLAPPED), PLANNERS[1:3]),
    ]
    if find_spec("transformer_engine") is None or not taken:
        return found
    engine = ("--transformer-impl", "transformer_engine", "--attention-backend")
    return [
        *found,
        Job("TE unfused", (*engine, "unfused")),
        Job("TE fused", (*engine, "fused")),
        Job("TE fused llama", (*engine, "fused", *LLAMA)),
        Job("TE flash llama", (*engine, "flash", *LLAMA)),
        Job("TE fused, gradients reduced beside", (*engine, "fused", *OVERLAPPED), PLANNERS[1:3]),
    ]


def command_line(job: Job, plan: str, folder: Path, tiny: bool, on_gpu: bool) -> list[str]:
    """Megatron's arguments for a run."""
    size = TINY if tiny else BIG
    return [
        *("--num-layers", str(size["layers"]), "--hidden-size", str(size["hidden"])),
        *("--num-attention-heads", str(size["heads"]), "--seq-length", str(size["sequence"])),
        *("--max-position-embeddings", str(size["sequence"]), "--vocab-size", str(size["vocabulary"])),
        *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", str(STEPS)),
        *("--lr", "1e-3", "--lr-decay-style", "constant", "--seed", "7", "--bf16"),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--eval-iters", "0"),
        *(
            "--logging-level",
            "40",
            "--data-cache-path",
            str(folder / "cache"),
            "--no-check-for-nan-in-loss-and-grad",
        ),
        *("--distributed-backend", "nccl" if on_gpu else "gloo", "--no-gradient-accumulation-fusion"),
        *job.flags,
        *_method(plan, folder / f"{job.name} {plan}".replace(" ", "_").replace(",", "")),
    ]


def _method(plan: str, report: Path) -> tuple[str, ...]:
    if plan == "stock full":
        return FULL
    if plan.startswith("stock"):
        return ()
    return ("--recompute-method", "lynx", "--lynx-planner", plan, "--lynx-report", str(report))


def run(job: Job, plan: str, folder: Path, tiny: bool, on_gpu: bool) -> Row:
    """Train once."""
    import torch
    from megatron.training import training

    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.trainer import lynx_trainer

    row, steps, printed = Row(job.name, plan), Steps(), io.StringIO()
    _forget_attention_backend()
    argv = command_line(job, plan, folder, tiny, on_gpu)
    try:
        with (
            contextlib.redirect_stdout(printed),
            mock.patch.object(training, "finalize_model_grads", _hashed(row.gradients)),
            mock.patch.object(training, "train_step", steps.around(training.train_step)),
            lynx_trainer(),
        ):
            pretrain.train(pretrain.parse(argv))
    except Exception as error:  # one run that fails says so in its row, the others go on
        row.error = f"{type(error).__name__}: {error}"
        print(traceback.format_exc(), file=sys.stderr)
    with contextlib.suppress(Exception):
        training.destroy_global_state()
    row.losses = steps.losses
    row.device_ns, row.host_ns = steps.device_ns(), steps.host_ns()
    row.activation_peak_bytes, row.reserved_bytes = steps.peak_bytes, torch.cuda.max_memory_reserved()
    if "lynx" in argv and not row.error:
        _read_report(row, Path(argv[-1]))
    gc.collect()
    torch.cuda.empty_cache()
    return row


def _read_report(row: Row, folder: Path) -> None:
    from megatron_lynx.cli.run_files import measured, read_report
    from megatron_lynx.simulator.memory import peak

    report = read_report(folder)
    sums = {one["name"]: one for one in measured(report)["stages"][0]["sums"]}
    row.planned_peak_bytes = peak(report.timeline, 0).size_bytes
    row.planned_kept_bytes = int(sums["kept by a microbatch"]["planned"])
    row.kept_bytes = int(sums["kept by a microbatch"]["measured"])
    row.rebuilt_in_windows_ns = int(sums["rebuilt in windows"]["measured"])
    row.rebuilt_on_demand_ns = int(sums["rebuilt on demand"]["measured"])


class Steps:
    """Losses of the trainer's steps, and the times of their schedules."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.peak_bytes = 0
        self._host: list[int] = []
        self._device: list[tuple[Any, Any]] = []

    def around(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """``train_step``, watched."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            given = list(args)
            schedule = given[
                6
            ]  # train_step(forward_step, data, model, optimizer, scheduler, config, schedule)
            given[6] = lambda *a, **k: self._timed(schedule, a, k)
            result = train_step(*given, **kwargs)
            self.losses.append(float(result[0]["lm loss"]))
            return result

        return watched

    def _timed(self, schedule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held_bytes = torch.cuda.memory_allocated()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        start_ns = time.perf_counter_ns()
        result = schedule(*args, **kwargs)
        self._host.append(time.perf_counter_ns() - start_ns)
        after.record()
        self._device.append((before, after))
        self.peak_bytes = torch.cuda.max_memory_allocated() - held_bytes  # of the last step
        return result

    def host_ns(self) -> int:
        """Until everything was queued."""
        return int(statistics.median(self._host[COUNTED_FROM:] or [0]))

    def device_ns(self) -> int:
        """Until everything was done."""
        import torch

        torch.cuda.synchronize()
        times = [int(before.elapsed_time(after) * 1e6) for before, after in self._device]
        return int(statistics.median(times[COUNTED_FROM:] or [0]))


def _hashed(gradients: list[str]) -> Callable[..., None]:
    """Megatron's reduction of gradients; hashes every bit of what comes out."""
    from megatron.core.distributed import finalize_model_grads

    def finalize(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
        finalize_model_grads(chunks, *args, **kwargs)
        found = hashlib.sha256()
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                found.update(name.encode() + parameter.main_grad.detach().cpu().float().numpy().tobytes())
        gradients.append(found.hexdigest())

    return finalize


def _forget_attention_backend() -> None:
    """Megatron writes the choice into the environment and holds every later model to it; TE keeps it too."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    chosen = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention")
    if chosen is not None:
        chosen._attention_backends["attention_params"] = None


@contextlib.contextmanager
def device(folder: Path) -> Iterator[bool]:
    """One rank on one device; yields whether that is a GPU."""
    import torch

    from megatron_lynx.integration.cpu.backend import cpu_backend_if_requested
    from megatron_lynx.integration.cpu.dataset_helpers import shipped_dataset_helpers

    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    os.environ.update(one)
    with contextlib.ExitStack() as stack:
        on_cpu = stack.enter_context(cpu_backend_if_requested())
        if not on_cpu:
            # What is compared to the last bit must be the same when it is computed twice. Before compute
            # capability 9.0 TE has no fused attention then.
            os.environ.update(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0", CUBLAS_WORKSPACE_CONFIG=":4096:8")
            stack.enter_context(shipped_dataset_helpers())  # the CPU backend brings them
        backend = "gloo" if on_cpu else "nccl"
        rendezvous = f"file://{(folder / 'rendezvous').resolve()}"
        torch.distributed.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
        yield not on_cpu
        torch.distributed.destroy_process_group()


def line(row: Row) -> str:
    """A row as text."""
    if row.error:
        return f"{row.job:36} {row.plan:16} {row.error[:120]}"
    times = f"device {row.device_ns / 1e6:8.2f} ms  host {row.host_ns / 1e6:8.2f} ms"
    peak = f"peak {row.activation_peak_bytes >> 20:6} MiB (planned {row.planned_peak_bytes >> 20:6})"
    kept = f"kept {row.kept_bytes:11} (planned {row.planned_kept_bytes:11})"
    return f"{row.job:36} {row.plan:16} {times}  {peak}  reserved {row.reserved_bytes >> 20:6}  {kept}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run every job under every plan until time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, to see that it runs")
    parser.add_argument("--jobs", metavar="NAMES", help="some of them, by semicolons")
    asked = parser.parse_args(argv)
    asked.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with device(asked.folder) as on_gpu, (asked.folder / "rows.jsonl").open("w") as out:
        named = asked.jobs.split(";") if asked.jobs else [job.name for job in jobs(on_gpu)]
        for job in (job for job in jobs(on_gpu) if job.name in named):
            for plan in ("stock", "stock again", "stock full", *job.planners):
                late = time.monotonic() - began > SECONDS
                row = (
                    Row(job.name, plan, error="not run: out of time")
                    if late
                    else run(job, plan, asked.folder, asked.tiny, on_gpu)
                )
                out.write(json.dumps(asdict(row)) + "\n")
                out.flush()
                print(line(row), flush=True)


if __name__ == "__main__":
    main()
