"""Megatron's trainer on Transformer Engine layers over the CPU reference: stock, from its own flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import te_reference
from tests.support.launch import REPOSITORY, run_ranks

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
CONTEXT = ("--context-parallel-size", "2", "--cp-comm-type", "a2a")
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
LYNX = ("--recompute-method", "lynx", "--lynx-planner", "windows")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "rank1.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("sizes", [TP2, PP2, CONTEXT], ids=["tp", "pp", "cp"])
def test_the_trainer_computes_the_same_with_full_recomputation_and_under_plans(
    tmp_path: Path, sizes: tuple[str, ...]
) -> None:
    common = [*MODEL, *CPU, *sizes, "--data-cache-path", str(tmp_path / "cache")]
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


SCRIPT = """
from megatron_lynx.integration import pretrain
if __name__ == "__main__":
    pretrain.train(pretrain.parse(None))
"""


@pytest.mark.parametrize("flags", [(), LYNX], ids=["stock", "lynx"])
def test_commands_need_nothing_but_their_environment(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Two ranks by torchrun: stock by the entry of this package, and a script that knows nothing of lynx by
    ``lynx run``."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    entry: tuple[str, ...] = ("-m", "megatron_lynx.pretrain_gpt")
    if flags:
        script = tmp_path / "train.py"
        script.write_text(SCRIPT)
        entry = ("-m", "megatron_lynx", "run", str(script))
    one_thread = {"MEGATRON_LYNX_CPU": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *entry, *MODEL, *CPU, *TP2, *flags, "--log-interval", "1"],
        cwd=REPOSITORY,
        env=os.environ | te_reference.environment() | one_thread,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        3/       3" in done.stdout
    assert ("regions of 2 layers are dropped and rebuilt" in done.stdout) == bool(flags)
