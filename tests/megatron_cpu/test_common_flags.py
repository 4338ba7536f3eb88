"""Flags that GPU jobs have, beside ``--recompute-method lynx``: the same training, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
from tests.megatron_cpu.fault_ranks import Found
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, MODEL
from tests.support.launch import run_ranks

LYNX = ("--recompute-method", "lynx", "--lynx-planner", "tail-free")
STEPS = 4
PP2 = ("--num-layers", "4", "--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
OVERLAP = (
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--ddp-bucket-size", "5000"),
)
"""With so small buckets every layer has several of its own, as a layer of a real model has."""

NO_LAYERS = ("E|ttttL", "Etttt|L", "Et|tt|t|L", "E|tt|t|tL", "E|tt||ttL")
THREE = ("--num-layers", "3", "--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
ROPE = ("--position-embedding-type", "rope", "--no-rope-fusion")
TWO = {
    **{f"layout {text}": (*PP2, "--pipeline-model-parallel-layout", text) for text in NO_LAYERS},
    "first": (*PP2, "--decoder-first-pipeline-num-layers", "1"),
    "last": (*PP2, "--decoder-last-pipeline-num-layers", "1"),
    "account": (*THREE, "--account-for-embedding-in-pipeline-split"),
    "account loss": (*THREE, "--account-for-loss-in-pipeline-split"),
    "mtp": (*PP2, *ROPE, "--mtp-num-layers", "1", "--decoder-last-pipeline-num-layers", "1"),
}
"""Stages and chunks without layers, splits that no layout string says, and layers beside the decoder's."""

FOUR = {
    "overlap": (*PP2, *OVERLAP),
}


class Runs:
    """Each row of the tables without and with lynx, in one launch for each number of ranks."""

    def __init__(self, folder: Path) -> None:
        prefix = build_dataset(folder / "data" / "text", size_bytes=200_000)
        data = [*dataset_arguments(prefix), "--split", "100,0,0", "--eval-iters", "0"]
        self.common = [*MODEL, *CPU_FLAGS, *data, "--data-cache-path", str(folder / "cache")]
        self._found: dict[str, list[Found]] = {}

    def both(
        self, rows: dict[str, tuple[str, ...]], ranks: int, name: str
    ) -> tuple[list[Found], list[Found]]:
        """What each rank found in stock's run of a row, and in lynx's."""
        if name not in self._found:
            argv = {row: [*self.common, *flags] for row, flags in rows.items()}
            argv |= {f"{row} lynx": [*words, *LYNX] for row, words in argv.items()}
            by_rank = run_ranks(
                ranks, "tests.megatron_cpu.fault_ranks:train", list(argv.values()), timeout_s=240
            )
            self._found |= {row: list(found) for row, *found in zip(argv, *by_rank, strict=True)}
        return self._found[name], self._found[f"{name} lynx"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("flags"))


def check_equal(stock: list[Found], lynx: list[Found]) -> None:
    for ours, theirs in zip(stock, lynx, strict=True):
        assert (ours.error, theirs.error) == ("", "")
        assert len(ours.gradients) == STEPS
        assert theirs.gradients == ours.gradients
        assert theirs.losses == ours.losses


def test_adapters_train_within_a_budget_for_adapters(runs: Runs) -> None:
    """It holds the weights, and optimizer state of what trains alone."""
    sizes = ("--num-layers", "4", "--tensor-model-parallel-size", "2", "--hidden-size", "256")
    stock = [*runs.common, *sizes]
    lynx = [*stock, "--recompute-method", "lynx", "--lynx-planner", "opt", "--lynx-budget", "14MiB"]
    by_rank = run_ranks(2, "tests.megatron_cpu.fault_ranks:train_adapters", [stock, lynx])
    for ours, theirs in by_rank:
        check_equal([ours], [theirs])
        parameters = re.search(r"number of parameters on .* rank \(\d, 0, 0\): (\d+)", ours.printed)
        assert parameters is not None
        assert 16 * int(parameters[1]) > 14 << 20  # in fp32: weight, gradient, two moments
    assert "regions of 4 layers are dropped" in by_rank[0][1].printed
    assert "please report" not in by_rank[0][1].printed


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_stock(runs: Runs, name: str) -> None:
    check_equal(*runs.both(FOUR, 4, name))


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_stock(runs: Runs, name: str) -> None:
    check_equal(*runs.both(TWO, 2, name))
    assert "> lynx: planner tail-free" in runs.both(TWO, 2, name)[1][0].printed
