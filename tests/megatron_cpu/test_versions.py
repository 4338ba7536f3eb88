"""Each supported release trains under lynx as it does without, to the last bit: wheels of their own.

Upstream's main branch has no wheel and is compared by hand: a folder with a link to the checkout's
``megatron`` takes the place of a wheel's.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
from tests.megatron_cpu.lynx_ranks import Case
from tests.megatron_cpu.test_lynx_training import LYNX, PP2, STEPS, TP2
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, LLAMA, MODEL
from tests.support.launch import REPOSITORY, run_ranks

WITH_TRAINER = ("0.17.1", "0.18.2")
CORE_ONLY = "0.16.1"


def wheel(version: str) -> Path:
    """The folder with that release, made once."""
    command = f"source scripts/setup_env.sh && lynx_megatron {version}"
    subprocess.run(["bash", "-c", command], cwd=REPOSITORY, check=True)
    return REPOSITORY / ".venv-megatron" / version


def test_the_core_of_the_oldest_release_trains_the_same() -> None:
    cases = [
        Case({"tp": 2}, ["windows"]),
        Case({"tp": 2, "sequence_parallel": True}, ["windows"]),
        Case({"pp": 2}, ["windows"]),
    ]
    found = run_ranks(2, "tests.megatron_cpu.lynx_ranks:compare", cases, megatron=wheel(CORE_ONLY))
    for outcomes in found:
        assert [outcome.different for outcome in outcomes] == [[]] * len(cases)
        assert not any(outcome.left_bytes for outcome in outcomes)
    assert [set(outcome.rebuilt) for outcome in found[0]] == [{"bwd", "head"}, {"bwd", "head"}, {"stall"}]


@pytest.mark.parametrize("version", WITH_TRAINER)
def test_the_trainer_of_an_older_release_trains_the_same(version: str, tmp_path: Path) -> None:
    prefix = build_dataset(tmp_path / "data" / "text", size_bytes=200_000)
    data = [*dataset_arguments(prefix), "--split", "100,0,0", "--eval-iters", "0"]
    common = [*MODEL, *CPU_FLAGS, *data, "--data-cache-path", str(tmp_path / "cache")]
    jobs = {"tp": [*common, *TP2, *LLAMA, "--sequence-parallel", "--bf16"], "pp": [*common, *PP2]}
    budgets = {"tp": "2.6MiB", "pp": "4.6MiB"}
    runs = {}
    for name, argv in jobs.items():
        report = ["--lynx-report", str(tmp_path / f"{name} report")]
        runs[name] = argv
        runs[f"{name} lynx"] = [*argv, *LYNX, "--lynx-budget", budgets[name], *report]
    payload = [(str(tmp_path / name), argv) for name, argv in runs.items()]
    train = "tests.megatron_cpu.test_lynx_training:train"
    found = [
        dict(zip(runs, one, strict=True)) for one in run_ranks(2, train, payload, megatron=wheel(version))
    ]
    for name in jobs:
        for ran in found:
            assert len(set(ran[name].gradients)) == STEPS
            assert ran[f"{name} lynx"].gradients == ran[name].gradients
        stock, lynx = (_losses(tmp_path / one) for one in (name, f"{name} lynx"))
        assert len(stock) == STEPS
        assert lynx == stock
        steps = (tmp_path / f"{name} report" / "steps.0.jsonl").read_text().splitlines()
        assert all(sum(json.loads(step)["rebuilt_bytes"].values()) > 0 for step in steps)


def _losses(folder: Path) -> list[float]:
    lines = (folder / "rank1.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
