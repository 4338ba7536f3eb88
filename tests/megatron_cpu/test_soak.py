"""Three hundred steps of Megatron's trainer: evaluations, checkpoints, Python's collector off.

TP 2 x PP 2 over four ranks, dropout on, stock and under a plan that drops what it can: equal losses and
gradients at every step, and no byte more at the end than at the beginning.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
from tests.megatron_cpu.fault_ranks import hashed
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS
from tests.support.launch import run_ranks

STEPS = 300
EVERY = 20
"""Steps from one count of live memory to the next."""
MODEL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--seed", "7"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", str(STEPS)),
    *("--lr", "1e-3", "--lr-decay-style", "constant"),
    *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"),
    *("--eval-interval", "70", "--eval-iters", "2", "--save-interval", "110"),
    *("--manual-gc", "--log-interval", "50"),
)
LYNX = ("--recompute-method", "lynx", "--lynx-planner", "windows")


def train(rank: int, world_size: int, payload: list[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """Train with each argument list; the hashes of every step's gradients, and what was alive after some:
    bytes of tensors, and objects of tapes."""
    import gc

    from megatron.training.training import destroy_global_state

    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.recorder import recorder_if_requested
    from megatron_lynx.integration.trainer import lynx_trainer

    found = []
    for record, argv in payload:
        os.environ["MEGATRON_LYNX_RECORD"] = record
        gradients: list[str] = []
        live: list[tuple[int, int]] = []
        with (
            contextlib.suppress(SystemExit),
            mock.patch("megatron.training.training.finalize_model_grads", hashed(gradients)),
            mock.patch("megatron.training.training.post_training_step_callbacks", _counting(live)),
            recorder_if_requested(),
            lynx_trainer(),
        ):
            pretrain.train(pretrain.parse(argv))
        destroy_global_state()
        gc.enable()
        gc.collect()
        found.append({"gradients": gradients, "live": live})
    return found


def _counting(live: list[tuple[int, int]]) -> Callable[..., Any]:
    """What Megatron's trainer calls after each step; counts what is alive every ``EVERY`` steps."""
    import gc

    from megatron.training.training import post_training_step_callbacks

    from tests.megatron_cpu.lynx_ranks import live_bytes, objects_of_tapes

    def after_step(model: Any, optimizer: Any, scheduler: Any, iteration: int, *more: Any) -> Any:
        if iteration % EVERY == 0:
            assert not gc.isenabled()
            live.append((live_bytes(), objects_of_tapes()))
        return post_training_step_callbacks(model, optimizer, scheduler, iteration, *more)

    return after_step


def test_three_hundred_steps(tmp_path: Path) -> None:
    prefix = build_dataset(tmp_path / "data" / "text", size_bytes=200_000)
    data = [*dataset_arguments(prefix), "--split", "80,20,0", "--data-cache-path", str(tmp_path / "cache")]
    runs = {"stock": [], "lynx": [*LYNX, "--lynx-report", str(tmp_path / "report")]}
    payload = [
        (str(tmp_path / name), [*MODEL, *CPU_FLAGS, *data, "--save", str(tmp_path / name / "saved"), *flags])
        for name, flags in runs.items()
    ]
    for stock, lynx in run_ranks(4, f"{__name__}:train", payload, timeout_s=900):
        assert len(stock["gradients"]) == STEPS
        assert lynx["gradients"] == stock["gradients"]
        for run in (stock, lynx):
            sizes = [size for size, _ in run["live"]]
            # After the first evaluation; what a link's thread lets go of late may be in a single count.
            assert min(sizes[4:9]) == min(sizes[-5:]), sizes
        assert [objects for _, objects in lynx["live"]] == [objects for _, objects in stock["live"]]
    losses = {name: (tmp_path / name / "rank3.jsonl").read_text().splitlines() for name in runs}
    found = {name: [json.loads(line)["loss"] for line in lines] for name, lines in losses.items()}
    assert len(found["stock"]) == STEPS
    assert found["lynx"] == found["stock"]
    assert found["stock"][-1] < found["stock"][0]
    steps = (tmp_path / "report" / "steps.0.jsonl").read_text().splitlines()
    assert len(steps) == STEPS
    assert json.loads(steps[-1])["rebuilt_bytes"]
