"""Megatron's trainer on Transformer Engine layers over the CPU reference: stock, from its own flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import te_reference
from tests.support.launch import REPOSITORY, run_ranks

TWO_RANKS = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--swiglu"),
    *("--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2", "--untie-embeddings-and-output-weights"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--bf16", "--seed", "7"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "3", "--lr", "1e-3"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--eval-iters", "0"),
    *("--use-distributed-optimizer", "--attention-backend", "fused"),
)
CPU = ("--distributed-backend", "gloo", "--no-gradient-accumulation-fusion")
"""Without the flags that a CPU needs for local layers."""
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "rank1.jsonl").read_text().splitlines()]


def test_the_trainer_computes_the_same_with_full_recomputation_and_under_plans(tmp_path: Path) -> None:
    common = [*MODEL, *CPU, *TWO_RANKS, "--data-cache-path", str(tmp_path / "cache")]
    lynx = [*common, "--recompute-method", "lynx", "--lynx-planner"]
    runs = {"none": common, "full": [*common, *FULL]}
    runs |= {name: [*lynx, name] for name in ("tail-free", "windows", "full-uniform-1")}
    payload = [(str(tmp_path / name), argv) for name, argv in runs.items()]
    found = run_ranks(2, "tests.megatron_cpu.test_lynx_training:train", payload, te=True)
    for by_rank in found:
        assert [run.gradients for run in by_rank] == [by_rank[0].gradients] * len(runs)
        assert all(run.gradients for run in by_rank)
    losses = _losses(tmp_path / "none")
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert all(_losses(tmp_path / name) == losses for name in runs)


def test_a_command_needs_nothing_but_its_environment() -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    one_thread = {"MEGATRON_LYNX_CPU": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *launcher,
            "-m",
            "megatron_lynx.pretrain_gpt",
            *MODEL,
            *CPU,
            "--log-interval",
            "1",
        ],
        cwd=REPOSITORY,
        env=os.environ | te_reference.environment() | one_thread,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        3/       3" in done.stdout
