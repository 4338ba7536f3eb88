"""Checkpoints across a changed split, with lynx and without: the losses of a run that nothing interrupted, or
a refusal by name before any step; and a rank that is killed in the middle of a step.

A walk goes from split to split: each of its jobs loads what the one before saved, trains one step and saves,
and every second one recomputes with lynx. So every move of it is loaded and trained, at a step each.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.cli.run_files import read_report
from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
from tests.megatron_cpu.job_ranks import TrainingJob
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, LLAMA
from tests.support.launch import run_ranks

MODEL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16"),
    # Two microbatches: a sum of two is the same in any order, so one replica adds what two add.
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "20"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--seed", "7", "--num-workers", "0"),
    # The vocabulary is padded to a multiple of it and TP, by random rows: as many for TP 1 and 2
    *("--make-vocab-size-divisible-by", "256"),
    # Clipping by a norm would sum over stages, in another order for another split.
    *("--clip-grad", "0", *LLAMA),
)
PP = "--pipeline-model-parallel-size"
TP2 = ("--tensor-model-parallel-size", "2")
LAYOUT = "--pipeline-model-parallel-layout"
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage"
SPLITS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (2, ()),
    "two": (4, (PP, "2")),
    "two uneven": (4, (PP, "2", LAYOUT, "Et|tttL")),
    "four": (4, (PP, "4")),
    "four uneven": (4, (PP, "4", LAYOUT, "E|tt|t|tL")),
    "chunks": (2, (PP, "2", INTERLEAVED, "1")),
    "chunks uneven": (2, (PP, "2", LAYOUT, "Et|tt|t|L")),
}
"""By split: ranks (data parallel where there are more than stages), and flags. Four layers in all."""

STAGES = {"one": 1, "two": 2, "four": 4, "chunks": 2}

DISTRIBUTED = ("--use-distributed-optimizer",)
RESHARDABLE = (*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable")
WALK = (
    *("one", "two", "two uneven", "four", "four uneven", "chunks", "chunks uneven"),
    *("one", "four uneven", "two uneven", "chunks uneven", "two", "chunks", "four", "one"),
)
WALKS = {"plain": (WALK, ()), "reshardable": (WALK[::-1], RESHARDABLE)}
"""Twice the same pairs, one optimizer each way."""
LYNX = ("--recompute-method", "lynx", "--lynx-planner", "full-uniform-1")
KILLED_IN, RUN = 4, 5


class Moves:
    """Every job of this file, in one launch of four ranks."""

    def __init__(self, folder: Path, walks: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
        self.folder = folder
        prefix = build_dataset(folder / "data" / "text", size_bytes=20_000)
        data = [*dataset_arguments(prefix), "--split", "100,0,0", "--eval-iters", "0"]
        self._common = (*MODEL, *CPU_FLAGS, *data, "--data-cache-path", str(folder / "cache"))
        self.walks = walks
        self._jobs: dict[str, TrainingJob] = {}
        for name, (walk, flags) in walks.items():
            self._add(f"{name} alone", walk[0], *flags, stop=len(walk) + 1)
            for step, split in enumerate(walk):
                lynx = LYNX if step % 2 else ()
                self._add(f"{name} {step}", split, *flags, *lynx, *self._saves(name), stop=step + 1)
        for split in SPLITS:
            self._add(f"fixed {split}", split, *DISTRIBUTED, *self._saves(f"fixed {split}"), stop=1)
            for other in SPLITS:
                load = ("--load", str(self.folder / "saved" / f"fixed {split}".replace(" ", "_")))
                lynx = () if split.endswith("uneven") else LYNX
                self._add(f"{split} to {other}", other, *DISTRIBUTED, *lynx, *load, only_parsed=True)
            ranks = 2 * STAGES[split.split()[0]]
            self._add(f"{split} to shards", split, *DISTRIBUTED, *TP2, *load, ranks=ranks, only_parsed=True)
        for name, (walk, flags) in walks.items():
            self._add(f"{name} to shards", "two", *flags, *TP2, *LYNX, *self._saves(name), stop=len(walk) + 1)
        by_rank = (*self._saves("by rank"), "--ckpt-format", "torch")
        self._add("by rank", "two", *by_rank, stop=1)
        self._add("by rank, again", "two", *LYNX, *by_rank, stop=2)
        self._add("by rank, moved", "two uneven", *by_rank, only_parsed=True)
        self._add("by rank, to shards", "two", *TP2, *by_rank, only_parsed=True)
        self._add("fixed alone", "two", *DISTRIBUTED, stop=2)
        self._add("fewer replicas", "two", *DISTRIBUTED, *LYNX, *self._saves("fixed two"), stop=2, ranks=2)
        self._add("moved", "two uneven", *DISTRIBUTED, *self._saves("fixed two"), stop=2)
        batch = ("--global-batch-size", "4")
        self._add("run", "two", *batch, stop=RUN)
        kept = (*batch, "--recompute-method", "lynx", "--lynx-report", str(folder / "report"))
        kept += ("--save", str(folder / "kept"), "--load", str(folder / "kept"), "--save-interval", "2")
        self._add("killed", "two", *kept, stop=RUN, killed_in=KILLED_IN)
        self._add("restarted", "two", *kept, stop=RUN)
        found = run_ranks(4, "tests.megatron_cpu.job_ranks:run_jobs", [*self._jobs.values()], timeout_s=500)
        self.ended: dict[str, list[str]] = {
            name: list(ended) for name, *ended in zip(self._jobs, *found, strict=True)
        }

    def _saves(self, name: str) -> tuple[str, ...]:
        folder = str(self.folder / "saved" / name.replace(" ", "_"))
        return ("--save", folder, "--load", folder, "--save-interval", "1")

    def _add(
        self, name: str, split: str, *flags: str, stop: int = 1, ranks: int | None = None, **more: Any
    ) -> None:
        most, own = SPLITS[split]
        argv = (*self._common, *own, *flags, "--exit-interval", str(stop))
        folder = self.folder / "jobs" / name.replace(" ", "_")
        self._jobs[name] = TrainingJob(folder, argv, ranks or most, **more)

    def losses(self, name: str) -> dict[int, float]:
        """By iteration, the loss that a job had, all digits."""
        job = self._jobs[name]
        path = job.folder / f"rank{job.ranks - 1}.jsonl"
        steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {step["iteration"]: step["loss"] for step in steps}


@pytest.fixture(scope="module")
def moves(tmp_path_factory: pytest.TempPathFactory) -> Moves:
    return Moves(tmp_path_factory.mktemp("moves"), WALKS)


def test_the_walks_make_every_kind_of_move() -> None:
    steps = list(itertools.pairwise(WALK))
    assert len(set(steps)) == len(steps)
    for split in SPLITS:
        assert sum(split in step for step in steps) >= 4
    uneven = {(before.endswith("uneven"), after.endswith("uneven")) for before, after in steps}
    assert uneven == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize("optimizer", WALKS)
def test_a_walk_through_the_splits_has_the_losses_of_a_run_that_stayed(moves: Moves, optimizer: str) -> None:
    walk, _ = moves.walks[optimizer]
    alone = moves.losses(f"{optimizer} alone")
    assert sorted(alone) == [*range(1, len(walk) + 2)]
    assert len(set(alone.values())) == len(alone)
    for step, split in enumerate(walk):
        name = f"{optimizer} {step}"
        assert moves.ended[name] == [""] * 4, (split, moves.ended[name])
        assert moves.losses(name) == {step + 1: alone[step + 1]}, (walk[step - 1], split)


def test_the_two_optimizers_agree(moves: Moves) -> None:
    """What is saved by one run and loaded by another has been the same all along."""
    assert moves.losses("plain alone") == moves.losses("reshardable alone")


def test_the_distributed_optimizers_own_format_moves_by_name_or_not_at_all(moves: Moves) -> None:
    """Every pair: the same split, or a refusal that names both and what makes the move possible."""
    shown = {
        "one": "4",
        "two": "2+2",
        "two uneven": "1+3",
        "four": "1+1+1+1",
        "four uneven": "0+2+1+1",
        "chunks": "1,1+1,1",
        "chunks uneven": "1,1+2,0",
    }
    for before, after in itertools.product(SPLITS, SPLITS):
        assert moves.ended[f"fixed {before}"] == [""] * 4
        sharded = moves.ended[f"{before} to shards"][0]
        assert "was saved with --tensor-model-parallel-size 1 and is to be loaded with 2, and the" in sharded
        assert "by --dist-ckpt-optim-fully-reshardable, which any split loads" in sharded
        error = moves.ended[f"{before} to {after}"][0]
        if before == after:
            assert error == ""
            continue
        assert error.startswith("ConfigError: --load "), (before, after)
        assert f"with {shown[before]} layers by stage and is to be loaded with {shown[after]}" in error
        assert "by --dist-ckpt-optim-fully-reshardable, which any split loads" in error


@pytest.mark.parametrize("optimizer", WALKS)
def test_a_move_to_tensor_parallelism_goes_on(moves: Moves, optimizer: str) -> None:
    """Its sums are in another order: equal to rounding, which is far finer than a step is long."""
    step = len(moves.walks[optimizer][0]) + 1
    alone = moves.losses(f"{optimizer} alone")
    assert moves.ended[f"{optimizer} to shards"] == [""] * 4
    found = moves.losses(f"{optimizer} to shards")
    assert found == {step: pytest.approx(alone[step], abs=1e-5)}
    assert abs(alone[step] - alone[step - 1]) > 1e-3


def test_a_file_for_each_rank_loads_where_it_was_saved_and_is_refused_elsewhere(moves: Moves) -> None:
    assert moves.ended["by rank, again"] == [""] * 4
    assert moves.losses("by rank") | moves.losses("by rank, again") == moves.losses("fixed alone")
    for name, says in (
        ("moved", "2+2 layers by stage and is to be loaded with 1+3"),
        ("to shards", "with 2"),
    ):
        error = moves.ended[f"by rank, {name}"][0]
        assert error.startswith("ConfigError: --load ")
        assert says in error
        assert "by --ckpt-format torch_dist" in error


def test_a_refused_move_is_refused_on_every_rank_before_any_step(moves: Moves) -> None:
    refused = moves.ended["moved"]
    assert len(set(refused)) == 1
    assert "--dist-ckpt-optim-fully-reshardable" in refused[0]
    assert moves.losses("moved") == {}


def test_the_same_split_with_fewer_replicas_goes_on(moves: Moves) -> None:
    assert moves.ended["fewer replicas"] == [""] * 4
    assert moves.losses("fixed two") | moves.losses("fewer replicas") == moves.losses("fixed alone")


def test_a_job_that_lost_a_rank_in_mid_step_goes_on_with_equal_losses(moves: Moves) -> None:
    alone = moves.losses("run")
    assert sorted(alone) == [*range(1, RUN + 1)]
    killed, restarted = moves.losses("killed"), moves.losses("restarted")
    assert moves.ended["killed"][3] == "SIGKILL"
    assert all(moves.ended["killed"][:3])
    assert moves.ended["restarted"] == [""] * 4
    assert killed == {step: alone[step] for step in range(1, KILLED_IN)}
    assert restarted == {step: alone[step] for step in range(KILLED_IN - 1, RUN + 1)}


def test_the_report_of_the_killed_run_can_be_read(moves: Moves) -> None:
    report = read_report(moves.folder / "report")
    assert report.iterations == (KILLED_IN - 1, RUN)
    assert len(report.runs) == 2
    first = read_report(moves.folder / "report", run=report.runs[0])
    assert first.iterations == (1, KILLED_IN - 1)
    assert first.missing == first.ahead == ()
