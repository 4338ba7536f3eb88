"""What planners promise in bytes, in real runs: kept by a microbatch, and the peak beside Megatron's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lynx.cli.run_files import measured, read_report
from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
from tests.megatron_cpu.fault_ranks import Found
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, MODEL
from tests.support.launch import run_ranks

JOB = ("--num-layers", "4", "--tensor-model-parallel-size", "2", "--seq-length", "64")
STOCK = {
    "none": (),
    "selective": ("--recompute-granularity", "selective"),
    **{
        f"full-{method}-{number}": (
            *("--recompute-granularity", "full", "--recompute-method", method),
            *("--recompute-num-layers", str(number)),
        )
        for method, number in (("uniform", 1), ("uniform", 2), ("uniform", 4), ("block", 2), ("block", 4))
    },
}
BUDGETED = ("opt", "heu", "checkmate", "adapipe", "mixed")
PLANNERS = {
    **{name: ("--lynx-planner", name) for name in (*STOCK, "windows", "tail-free")},
    **{name: ("--lynx-planner", name, "--lynx-budget", "4.2MiB") for name in BUDGETED},
}


class Runs:
    """Stock's methods and lynx's planners on one job, in one launch."""

    def __init__(self, folder: Path) -> None:
        prefix = build_dataset(folder / "data" / "text", size_bytes=200_000)
        data = [*dataset_arguments(prefix), "--split", "100,0,0", "--eval-iters", "0", "--train-iters", "2"]
        common = [*MODEL, *CPU_FLAGS, *data, "--data-cache-path", str(folder / "cache"), *JOB]
        self.folder = folder
        rows = {f"stock {name}": [*common, *flags] for name, flags in STOCK.items()}
        for name, flags in PLANNERS.items():
            report = ("--lynx-report", str(folder / name))
            rows[name] = [*common, "--recompute-method", "lynx", *flags, *report]
        by_rank = run_ranks(2, "tests.megatron_cpu.fault_ranks:train", list(rows.values()), timeout_s=300)
        self.found: dict[str, list[Found]] = {
            name: list(ranks) for name, *ranks in zip(rows, *by_rank, strict=True)
        }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("bytes"))


@pytest.mark.parametrize("name", PLANNERS)
def test_training_is_stocks(runs: Runs, name: str) -> None:
    for rank, stock in enumerate(runs.found["stock none"]):
        found = runs.found[name][rank]
        assert (stock.error, found.error) == ("", "")
        assert len(stock.gradients) == 2
        assert (found.losses, found.gradients) == (stock.losses, stock.gradients)


@pytest.mark.parametrize("name", PLANNERS)
def test_a_microbatch_keeps_what_was_planned(runs: Runs, name: str) -> None:
    (stage,) = measured(read_report(runs.folder / name))["stages"]
    kept = next(row for row in stage["sums"] if row["name"] == "kept by a microbatch")
    assert kept["measured"] == kept["planned"] > 0


@pytest.mark.parametrize("name", [name for name in STOCK if name != "none"])
def test_the_peak_is_megatrons_own(runs: Runs, name: str) -> None:
    """Not above what Megatron's own recomputation takes, but for the random states of one layer."""
    peaks = [runs.found[key][0].peak_bytes for key in (f"stock {name}", name, "stock none")]
    assert name == "full-uniform-4" or 0 < peaks[0] < peaks[2]  # that one rebuilds all it has at once
    assert peaks[1] <= peaks[0] * 1.02
