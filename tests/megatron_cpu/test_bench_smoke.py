"""``lynx bench`` and ``lynx profile`` end to end on a tiny model; times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lynx.cli.bench_result import from_json
from megatron_lynx.cost import SCHEMA, CostTable

ROOT = Path(__file__).parents[2]


def lynx(*words: str, ranks: int = 0, timeout_s: int = 240) -> str:
    """Run ``lynx`` (under torchrun if it needs ranks); returns what it printed."""
    launcher = [sys.executable, "-m"]
    if ranks:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    done = subprocess.run(
        [*launcher, "megatron_lynx", *words],
        cwd=ROOT,
        env={
            **os.environ,
            "MEGATRON_LYNX_CPU": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("case", ["tp2", "pp2"])
def test_bench_measures_every_method_and_writes_a_page(tmp_path: Path, case: str) -> None:
    out, page = tmp_path / "bench.json", tmp_path / "page.md"
    lynx(
        *("bench", "--local", "--tiny", "--cases", case, "--rounds", "1", "--budgets", "80%"),
        *("--folder", str(tmp_path / "runs"), "--json", str(out), "--docs", str(page)),
    )
    _, (measured,) = from_json(out.read_text(), "bench.json")
    names = {row.name for row in measured.rows}
    assert {"none", "full-uniform-1", "full-block-2", "selective"} <= names
    peaks = {row.name: row.peak_bytes for row in measured.rows}
    assert peaks["full-uniform-1"] < peaks["none"]
    assert all(row.step_ns > 0 and row.predicted_step_ns for row in measured.rows)
    assert page.read_text().count(f"bench-{case}-loopback.svg") == 1
    assert (tmp_path / f"bench-{case}-loopback.svg").is_file()


def test_profile_writes_costs_that_planning_reads(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1"
    switches = "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
    arguments = (
        f"{model} --max-position-embeddings 64 --tensor-model-parallel-size 2 --global-batch-size 1 "
        "--transformer-impl local --distributed-backend gloo --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size 127 --train-iters 10 --lr 1e-4 --eval-iters 0 {switches}"
    )
    printed = lynx("profile", "--output", str(out), "--", *arguments.split(), ranks=2)
    table = CostTable.from_json(out.read_text())
    assert json.loads(out.read_text())["schema"] == SCHEMA
    assert "linear_fc1" in printed
    assert all(time > 0 for time in table.layer.collective_ns.values())
    regions = set(table.layer.forward_ns)
    assert {"core_attention", "qkv_split", "activation", "mlp_dropout"} <= regions
    assert table.layer.backward_ns("core_attention") > 0
    assert table.layer.contention >= 1.0
    assert min(table.embedding_forward_ns, table.head_forward_ns, table.head_backward_ns) > 0
