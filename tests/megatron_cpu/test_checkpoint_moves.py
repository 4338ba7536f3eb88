"""Checkpoints across a changed split: the losses of an uninterrupted run, or a refusal by name; none silent.

Without dropout, whose masks follow the stage that draws them; without clipping by the gradient's norm,
and with an output layer of its own: both are sums over stages, whose order decides the last bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, MODEL
from tests.support.launch import run_ranks

COMMON = (
    *(*MODEL, *CPU_FLAGS, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"),
    *("--eval-iters", "0", "--hidden-dropout", "0", "--attention-dropout", "0", "--clip-grad", "0"),
    *(
        "--num-layers",
        "4",
        "--untie-embeddings-and-output-weights",
        "--no-create-attention-mask-in-dataloader",
    ),
)
LYNX = ("--recompute-method", "lynx", "--lynx-planner", "windows")
PP2 = ("--pipeline-model-parallel-size", "2")
SPLITS = {
    "pp1": (),
    "even": PP2,
    "uneven": (*PP2, "--pipeline-model-parallel-layout", "Ettt|tL"),
    "vpp": (*PP2, "--num-layers-per-virtual-pipeline-stage", "1"),
    "pp4": ("--pipeline-model-parallel-size", "4"),
}
DISTRIBUTED = ("--use-distributed-optimizer",)
OPTIMIZERS = {
    "plain": (),
    "buckets": DISTRIBUTED,
    "reshardable": (*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"),
}
SAVED_AT, STEPS = 2, 4

Key = tuple[str, str]
"""A split and an optimizer."""


def possible(before: Key, after: Key) -> bool:
    """Whether Megatron can load what ``before`` saved."""
    if (before[1] == "plain") != (after[1] == "plain"):
        return False
    return before[1] != "buckets" or before[0] == after[0]


class Moves:
    """Runs that save, and runs that load what they saved; launched by the number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.refused: dict[tuple[Key, Key], list[str]] = {}

    def launch(self, ranks: int, saves: list[Key], moves: list[tuple[Key, Key]]) -> None:
        """One launch of so many ranks: first what saves, then what loads."""
        runs = [(str(self._record(key, key)), self._saving(key)) for key in saves]
        runs += [(str(self._record(*move)), self._loading(*move)) for move in moves]
        found = run_ranks(ranks, "tests.megatron_cpu.checkpoint_ranks:train", runs, timeout_s=500)
        for number, move in enumerate(moves, len(saves)):
            self.refused[move] = [one[number] for one in found]

    def losses(self, before: Key, after: Key, last_rank: int) -> list[float]:
        """The loss of each step."""
        path = self._record(before, after) / f"rank{last_rank}.jsonl"
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []

    def _record(self, before: Key, after: Key) -> Path:
        name = "saves" if before == after else "loads"
        return self._folder / "_".join((name, *before, *after))

    def _saving(self, key: Key) -> list[str]:
        folder = str(self._folder / "_".join(key))
        lynx = LYNX if key[0] == "vpp" else ()
        words = [*COMMON, *SPLITS[key[0]], *OPTIMIZERS[key[1]], *lynx]
        return [*words, "--save", folder, "--save-interval", str(SAVED_AT)]

    def _loading(self, before: Key, after: Key) -> list[str]:
        folder = str(self._folder / "_".join(before))
        lynx = () if after[0] == "vpp" else LYNX
        words = [*COMMON, *SPLITS[after[0]], *OPTIMIZERS[after[1]], *lynx]
        return [*words, "--load", folder, "--ckpt-step", str(SAVED_AT)]


RANKS = {"pp1": 1, "even": 2, "uneven": 2, "vpp": 2, "pp4": 4}
TWO = [(split, optimizer) for optimizer in OPTIMIZERS for split in ("even", "uneven", "vpp")]
WITHIN = [
    *[(a, b) for a in TWO for b in TWO if a[1] == b[1] and a != b],
    *[(("even", "plain"), ("even", "buckets")), (("even", "reshardable"), ("even", "plain"))],
    (("even", "reshardable"), ("uneven", "buckets")),
]
TO_FOUR = [(("even", o), ("pp4", o)) for o in OPTIMIZERS] + [(("vpp", "plain"), ("pp4", "plain"))]
TO_ONE = [((split, o), ("pp1", o)) for o in ("plain", "reshardable") for split in ("uneven", "pp4")]
BACK = [((split, o), ("uneven", o)) for o in OPTIMIZERS for split in ("pp1", "pp4")]
MOVES = [*WITHIN, *TO_FOUR, *TO_ONE, *BACK]


@pytest.fixture(scope="module")
def moves(tmp_path_factory: pytest.TempPathFactory) -> Moves:
    moves = Moves(tmp_path_factory.mktemp("moves"))
    moves.launch(2, TWO, WITHIN)
    moves.launch(4, [("pp4", o) for o in OPTIMIZERS], TO_FOUR)
    moves.launch(1, [("pp1", o) for o in OPTIMIZERS], TO_ONE)
    moves.launch(2, [], BACK)
    return moves


@pytest.mark.parametrize("move", MOVES, ids=lambda move: "-".join(move[0]) + " to " + "-".join(move[1]))
def test_a_move_gives_the_losses_of_an_uninterrupted_run_or_is_refused(
    moves: Moves, move: tuple[Key, Key]
) -> None:
    before, after = move
    found = moves.losses(before, after, RANKS[after[0]] - 1)
    refused = moves.refused[move]
    if possible(before, after):
        assert refused == [""] * RANKS[after[0]]
        alone = moves.losses(before, before, RANKS[before[0]] - 1)
        assert len(alone) == STEPS
        assert found == alone[SAVED_AT:]
        return
    assert found == []
    assert len(set(refused)) == 1  # every rank says the same
    moved = before[1] == after[1]
    works = "--dist-ckpt-optim-fully-reshardable" if moved else "--use-distributed-optimizer"
    assert works in refused[0]
    assert "--no-load-optim" in refused[0]


def test_lynx_and_optimizer_change_no_loss(moves: Moves) -> None:
    for split in RANKS:
        every = [moves.losses((split, o), (split, o), RANKS[split] - 1) for o in OPTIMIZERS]
        assert every[0] == every[1] == every[2]
