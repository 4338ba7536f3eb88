"""``python -m megatron_lynx.pretrain_gpt``: Megatron's own trainer, flags, checkpoints and data."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.integration.dataset import (
    END_OF_DOCUMENT,
    VOCABULARY_SIZE,
    build_dataset,
    dataset_arguments,
)
from tests.support.launch import REPOSITORY, run_ranks

CPU_FLAGS = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--no-persist-layer-norm"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
)
MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "4"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--seed", "7"),
)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
LLAMA = (
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--group-query-attention", "--num-query-groups", "2"),
    *("--position-embedding-type", "rope", "--no-rope-fusion"),
    *("--untie-embeddings-and-output-weights", "--hidden-dropout", "0", "--attention-dropout", "0"),
)
TP2 = ("--tensor-model-parallel-size", "2")


def train(rank: int, world_size: int, payload: list[tuple[str, list[str]]]) -> None:
    """Run the entry with each argument list; each writes its steps into the folder named first."""
    from megatron.training.training import destroy_global_state

    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.recorder import recorder_if_requested

    for record, argv in payload:
        os.environ["MEGATRON_LYNX_RECORD"] = record
        # --exit-interval leaves the process; main() would enter the CPU backend a second time.
        with contextlib.suppress(SystemExit), recorder_if_requested():
            pretrain.train(pretrain.parse(argv))
        destroy_global_state()


def _steps(record: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (record / f"rank{rank}.jsonl").read_text().splitlines()]


class Runs:
    """Many runs of the entry in one launch of two ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Megatron loops for ever over a split without a document, and there are few documents here.
        prefix = build_dataset(folder / "data" / "text", size_bytes=200_000)
        data = [*dataset_arguments(prefix), "--split", "100,0,0"]
        common = [*MODEL, *CPU_FLAGS, "--data-cache-path", str(folder / "cache")]
        text, mock = (
            [*common, *data, "--eval-iters", "0"],
            [*common, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"],
        )
        save = ["--save", str(folder / "checkpoint"), "--save-interval", "2", "--exit-interval", "2"]
        self._runs = {
            "none": [*text, *TP2],
            "full": [*text, *TP2, *FULL],
            "selective": [*text, *TP2, "--recompute-granularity", "selective"],
            "killed": [*text, *TP2, *save],
            "restarted": [*text, *TP2, "--load", str(folder / "checkpoint")],
            "sp": [*text, *TP2, "--sequence-parallel", "--bf16"],
            "vpp": [
                *(*text, *LLAMA, "--pipeline-model-parallel-size", "2"),
                *("--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"),
            ],
            "distributed optimizer": [*text, "--use-distributed-optimizer", "--overlap-grad-reduce"],
            "mock": [*mock, *TP2, "--eval-iters", "1", "--eval-interval", "2"],
        }
        run_ranks(
            2,
            f"{__name__}:train",
            [(str(self._record(name)), argv) for name, argv in self._runs.items()],
            timeout_s=400,
        )

    def __iter__(self) -> Any:
        return iter(self._runs)

    def steps(self, name: str, rank: int = 1) -> list[dict[str, Any]]:
        """What the recorder wrote on ``rank``; the last one has the last pipeline stage."""
        return _steps(self._record(name), rank)

    def losses(self, name: str) -> list[float]:
        """The loss of each step, with all digits."""
        return [step["loss"] for step in self.steps(name)]

    def _record(self, name: str) -> Path:
        return self._folder / name.replace(" ", "_")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("pretrain"))


def test_every_run_trains(runs: Runs) -> None:
    for name in runs:
        losses = runs.losses(name)
        assert len(losses) == (2 if name in ("killed", "restarted") else 4), name
        assert all(0 < loss < 10 for loss in losses), name
        assert losses[-1] < losses[0], name


def test_stock_recomputation_computes_the_same(runs: Runs) -> None:
    assert runs.losses("none") == runs.losses("full") == runs.losses("selective")


def test_a_restarted_run_continues_as_an_uninterrupted_one(runs: Runs) -> None:
    assert runs.losses("killed") + runs.losses("restarted") == runs.losses("none")
    assert [step["iteration"] for step in runs.steps("restarted")] == [3, 4]


def test_the_meter_sees_what_recomputation_saves(runs: Runs) -> None:
    peaks = {name: runs.steps(name)[1]["peak_bytes"] for name in ("none", "full", "selective")}
    assert peaks["full"] < peaks["selective"] < peaks["none"]


def test_only_the_second_step_is_metered_and_every_step_is_timed(runs: Runs) -> None:
    steps = runs.steps("none")
    assert [step["peak_bytes"] is None for step in steps] == [True, False, True, True]
    assert all(step["step_ns"] > 0 for step in steps)


def test_ranks_without_the_last_stage_have_no_loss(runs: Runs) -> None:
    assert [step["loss"] for step in runs.steps("vpp", rank=0)] == [None] * 4


# --- the command ---------------------------------------------------------------------------------


def _command(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "MEGATRON_LYNX_CPU": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


MOCK = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--eval-iters", "0")


def test_the_command_trains_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = _command(
        [
            *torchrun,
            "-m",
            "megatron_lynx.pretrain_gpt",
            *MODEL,
            *CPU_FLAGS,
            *MOCK,
            *TP2,
            "--log-interval",
            "1",
        ],
        MEGATRON_LYNX_RECORD=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        4/       4" in done.stdout
    assert "CPU RNG state changed" not in done.stdout + done.stderr
    for rank in range(2):
        assert [step["iteration"] for step in _steps(tmp_path, rank)] == [1, 2, 3, 4]


def test_flags_that_the_cpu_needs_are_named_at_once() -> None:
    done = _command(["megatron_lynx.pretrain_gpt", *MODEL, *MOCK])
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "pretrain_gpt: training on CPU needs these flags too: --distributed-backend gloo "
        "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
        "--no-masked-softmax-fusion"
    )


def test_what_only_upstreams_script_can_do_is_refused() -> None:
    data = ["--data-path", "nowhere", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    done = _command(["megatron_lynx.pretrain_gpt", *MODEL, *CPU_FLAGS, *data, "--fim-data"])
    assert done.returncode == 2
    assert "pretrain_gpt: --fim-data is not supported" in done.stderr
    assert "lynx run PATH/TO/pretrain_gpt.py" in done.stderr


# --- the dataset ---------------------------------------------------------------------------------


def test_the_dataset_is_the_sources_byte_for_byte(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    source = tmp_path / "library"
    (source / "test").mkdir(parents=True)
    texts = {"b.py": "x = 'é'\n", "a.py": "pass\n", "big.py": "#" * 100, "empty.py": "", "test/t.py": "no"}
    for name, text in texts.items():
        (source / name).write_text(text)
    prefix = build_dataset(tmp_path / "data", size_bytes=50, source=source)
    dataset = IndexedDataset(str(prefix))
    documents = [dataset[index].tolist() for index in range(len(dataset))]
    assert documents == [
        [*texts["a.py"].encode(), END_OF_DOCUMENT],
        [*texts["b.py"].encode(), END_OF_DOCUMENT],
    ]
    assert max(map(max, documents)) < VOCABULARY_SIZE


def test_the_dataset_is_built_once_and_again_when_the_sources_change(tmp_path: Path) -> None:
    source = tmp_path / "library"
    source.mkdir()
    (source / "a.py").write_text("pass\n")
    index = build_dataset(tmp_path / "data", source=source).with_suffix(".idx")
    first = index.stat().st_mtime_ns
    build_dataset(tmp_path / "data", source=source)
    assert index.stat().st_mtime_ns == first
    (source / "b.py").write_text("pass\n")
    build_dataset(tmp_path / "data", source=source)
    assert index.stat().st_mtime_ns != first
