"""A hundred planted faults in plans, profiles and flags: each refused before the first step, on every rank,
by name; none hangs. And the same flags, planned by ``lynx plan`` or measured by ``lynx profile``, train."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.training import arguments

from megatron_lynx.cli.job import add_job_flags, choices_from
from megatron_lynx.cli.main import main
from megatron_lynx.integration.arguments import with_lynx_arguments
from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
from megatron_lynx.integration.refusals import REFUSALS
from megatron_lynx.plan import parse_plan
from tests.megatron_cpu.fault_ranks import Found
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, MODEL
from tests.support.launch import REPOSITORY, run_ranks
from tests.support.planted import planted

LYNX = ("--recompute-method", "lynx")
BUDGET = "4.2MiB"
JOB = ("--num-layers", "4", "--tensor-model-parallel-size", "2", "--train-iters", "2")

Fault = tuple[list[str], tuple[str, ...]]
"""Words to add to the command line, and what the refusal must name."""


def flags_of(refusals: Iterator[str] | None = None) -> dict[str, Fault]:
    """Every flag of the table of refusals that Megatron's parser takes, with a value that it takes."""
    taken: dict[str, argparse.Action] = {}

    def note(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for action in parser._actions:
            taken.update(dict.fromkeys(action.option_strings, action))
        return parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["x"])
        arguments.parse_args(with_lynx_arguments(note), ignore_unknown_args=True)
    found: dict[str, Fault] = {}
    for refusal in REFUSALS:
        action = taken.get(refusal.flag)
        if action is None or not refusal.fields:
            continue
        allowed = [*map(str, refusal.allowed)]
        value = next((str(c) for c in action.choices or ("2",) if str(c) not in allowed), "2")
        words = [refusal.flag] if action.nargs == 0 else [refusal.flag, value]
        found[refusal.flag] = (words, ("ConfigError", refusal.flag, refusal.instead))
    return found


def own_flags(folder: Path, plan: Path, costs: Path) -> dict[str, Fault]:
    """Faults in lynx's own flags, and in profiles."""
    table = json.loads(costs.read_text())
    broken = {
        "not a table": ("loss: 3", ("not a table of costs",)),
        "half a table": (costs.read_text()[:100], ("not a table of costs",)),
        "another schema": (json.dumps({**table, "schema": 7}), ("schema 7",)),
        "a time below 0": (json.dumps({**table, "p2p_ns": -1}), ("p2p_ns", "-1")),
        "a time in words": (json.dumps({**table, "head_forward_ns": "long"}), ("head_forward_ns", "long")),
        "no layer": (json.dumps({k: v for k, v in table.items() if k != "layer"}), ("layer",)),
    }
    for name in ("hidden_size", "seq_length", "tensor_model_parallel_size"):
        job = {**table["job"], name: 2 * table["job"][name]}
        text = json.dumps({**table, "graph": "0" * 16, "job": job})
        broken[f"another {name}"] = (text, ("--" + name.replace("_", "-"), str(job[name])))
    found: dict[str, Fault] = {}
    for number, (name, (text, parts)) in enumerate(broken.items()):
        path = folder / f"costs.{number}.json"
        path.write_text(text)
        found[f"profile: {name}"] = (["--lynx-profile", str(path)], ("ConfigError", "--lynx-profile", *parts))
    file = str(plan)
    rows: dict[str, tuple[list[str], tuple[str, ...]]] = {
        "an unknown planner": (["--lynx-planner", "best"], ("--lynx-planner", "'best'", "opt")),
        "a group of 0": (["--lynx-planner", "full-uniform-0"], ("--lynx-planner full-uniform-0",)),
        "no unit": (["--lynx-budget", "32"], ("--lynx-budget", "32GiB")),
        "nothing": (["--lynx-budget", "0GiB"], ("--lynx-budget",)),
        "too little": (["--lynx-budget", "1MiB"], ("InfeasibleError", "--lynx-planner opt", "--lynx-budget")),
        "no plan": (["--lynx-plan", "no/such/file"], ("--lynx-plan no/such/file",)),
        "no profile": (["--lynx-profile", "no/such/file"], ("--lynx-profile no/such/file",)),
        "two ways": (["--lynx-plan", file, "--lynx-planner", "opt"], ("exclude each other",)),
        "a split of one": (["--lynx-partition", "search"], ("--pipeline-model-parallel-size",)),
        "a report in a file": (["--lynx-report", file], ("--lynx-report", "folder")),
        "another model": (["--lynx-plan", file, "--hidden-size", "128"], ("--hidden-size 64", "128")),
        "another length": (["--lynx-plan", file, "--seq-length", "32"], ("--seq-length 64", "32")),
        "other layers": (["--lynx-plan", file, "--num-layers", "2"], ("--num-layers 4", "2")),
        "no dropout": (["--lynx-plan", file, "--hidden-dropout", "0"], ("--hidden-dropout yes", "no")),
        "another type": (["--lynx-plan", file, "--bf16"], ("--bf16", "4")),
        "an activation": (["--lynx-plan", file, "--swiglu"], ("--swiglu no", "yes")),
        "own mask": (
            ["--lynx-plan", file, "--no-create-attention-mask-in-dataloader"],
            ("--create-attention-mask-in-dataloader yes", "no"),
        ),
    }
    return found | {f"lynx: {name}": row for name, row in rows.items()}


class Runs:
    """All of it in one launch of two ranks, after ``lynx profile`` and ``lynx plan`` on the same flags."""

    def __init__(self, folder: Path) -> None:
        prefix = build_dataset(folder / "data" / "text", size_bytes=200_000)
        data = [*dataset_arguments(prefix), "--split", "100,0,0", "--eval-iters", "0"]
        common = [*MODEL, *CPU_FLAGS, *data, "--data-cache-path", str(folder / "cache"), *JOB]
        plan, costs, made = folder / "plan.txt", folder / "costs.json", folder / "made.txt"
        script = folder / "job.sh"
        script.write_text(f"torchrun --nproc-per-node 2 pretrain_gpt.py {shlex.join(common)}\n")
        self.profiled = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *("-m", "megatron_lynx", "profile", "--output", str(costs), "--", *common),
            ],
            env={
                **os.environ,
                "MEGATRON_LYNX_CPU": "1",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(REPOSITORY),
            },
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=200,
        )
        flags = ["--from-args", str(script), "--cluster", "toy", "--budget", BUDGET]
        self.codes = [
            main(["plan", *flags, "--planner", "heu", "-o", str(plan)]),
            main(["plan", *flags, "--profile", str(costs), "-o", str(made)]),
        ]
        rows: dict[str, list[str]] = {
            "stock": common,
            "planned": [*common, *LYNX, "--lynx-plan", str(plan)],
            "planned by a profile": [*common, *LYNX, "--lynx-plan", str(made)],
            "profiled": [*common, *LYNX, "--lynx-profile", str(costs), "--lynx-budget", BUDGET],
        }
        self.sound = [*rows]
        self.faults: dict[str, tuple[str, ...]] = {}
        parser = argparse.ArgumentParser()
        add_job_flags(parser)
        job = choices_from(parser.parse_args(flags)).job
        for number, (what, text, parts) in enumerate(planted(job, parse_plan(plan.read_text()))):
            path = folder / f"plan.{number}.txt"
            path.write_text(text)
            self._add(
                rows, f"plan {number}: {what}", ["--lynx-plan", str(path)], ("PlanError", *parts), common
            )
        for name, (words, parts) in (flags_of() | own_flags(folder, plan, costs)).items():
            self._add(rows, name, words, parts, common)
        by_rank = run_ranks(2, "tests.megatron_cpu.fault_ranks:train", list(rows.values()), timeout_s=500)
        self.found: dict[str, list[Found]] = {
            name: list(ranks) for name, *ranks in zip(rows, *by_rank, strict=True)
        }

    def _add(
        self,
        rows: dict[str, list[str]],
        name: str,
        words: list[str],
        parts: tuple[str, ...],
        common: list[str],
    ) -> None:
        rows[name] = [*common, *LYNX, *words]
        self.faults[name] = parts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("faults"))


def test_what_was_planned_or_profiled_from_the_same_flags_trains(runs: Runs) -> None:
    assert runs.profiled.returncode == 0, runs.profiled.stderr
    assert runs.codes == [0, 0]
    stock = runs.found["stock"]
    for name in runs.sound[1:]:
        for ours, theirs in zip(stock, runs.found[name], strict=True):
            assert theirs.error == ""
            assert len(ours.gradients) == 2
            assert (theirs.losses, theirs.gradients) == (ours.losses, ours.gradients)
        assert "regions of 4 layers are dropped and rebuilt" in runs.found[name][0].printed


def test_every_fault_is_refused_by_name_before_the_first_step_on_every_rank(runs: Runs) -> None:
    wrong = []
    for name, parts in runs.faults.items():
        for rank, found in enumerate(runs.found[name]):
            if found.gradients or any(part not in found.error for part in parts):
                wrong.append(f"{name} on rank {rank}: {found.error or 'trained'!r} without {parts}")
    assert not wrong, "\n".join(wrong)


def test_a_hundred_faults_are_planted(runs: Runs) -> None:
    assert len(runs.faults) >= 100
