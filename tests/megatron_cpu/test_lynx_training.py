"""``--recompute-method lynx`` in Megatron's own trainer: same losses and gradients, plans carried out."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_lynx.cli.run_files import measured, read_report
from megatron_lynx.graph import LayerGraph
from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
from megatron_lynx.plan import Choice, LayerPlan, Plan, StagePlan, Window, parse_plan
from tests.megatron_cpu.fault_ranks import hashed
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, LLAMA, MODEL
from tests.support.launch import REPOSITORY, run_ranks

LAYERS = ("--num-layers", "4")
TP2 = (*LAYERS, "--tensor-model-parallel-size", "2")
PP2 = (*LAYERS, "--pipeline-model-parallel-size", "2")
# Middle chunks get no attention mask from the data, and would make one that the graph leaves out.
OWN_MASK = "--no-create-attention-mask-in-dataloader"
VPP2 = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1", OWN_MASK)
TP2_PP2 = (*PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--global-batch-size", "8")
LYNX = ("--recompute-method", "lynx")
STEPS = 4

Run = tuple[str, list[str]]


@dataclass
class Found:
    """A run on one rank: each step's gradients, hashed; and where lynx was asked for, its layers, their
    graph, and the microbatches of a step."""

    gradients: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    graph: LayerGraph | None = None
    microbatches: int = 0


def train(rank: int, world_size: int, payload: list[Run]) -> list[Found]:
    """Run the entry's parts with each argument list."""
    from megatron.training import get_args, training

    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.describe import batch_of, model_of, parallel_of
    from megatron_lynx.integration.recorder import recorder_if_requested
    from megatron_lynx.integration.trainer import lynx_trainer
    from megatron_lynx.layers.local import layer_graph

    runs: list[Found] = []
    for record, argv in payload:
        os.environ["MEGATRON_LYNX_RECORD"] = record
        runs.append(found := Found())
        with (
            contextlib.suppress(SystemExit),
            mock.patch.object(training, "finalize_model_grads", hashed(found.gradients)),
            recorder_if_requested(),
            lynx_trainer() as trainer,
        ):
            args = pretrain.parse(argv)
            keep = trainer.bind

            def bind(chunks: Any, keep: Any = keep, found: Found = found) -> None:
                keep(chunks)
                session = trainer.session
                if session is None:
                    return
                args = get_args()
                import torch
                from megatron.core.utils import get_model_config, unwrap_model

                model = model_of(args, get_model_config(unwrap_model(chunks)[0]), torch.device("cpu"))
                parallel, batch = parallel_of(args), batch_of(args)
                found.graph = layer_graph(model, parallel, batch)
                found.layers = [layer.layer for layer in session.executor.plan.layers]
                found.microbatches = batch.num_microbatches(parallel.dp)

            trainer.bind = bind  # type: ignore[method-assign]
            pretrain.train(args)
        training.destroy_global_state()
    return runs


class Runs:
    """Many runs in few launches: each happens when one of its runs is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        prefix = build_dataset(folder / "data" / "text", size_bytes=200_000)
        data = [*dataset_arguments(prefix), "--split", "100,0,0", "--eval-iters", "0"]
        common = [*MODEL, *CPU_FLAGS, *data, "--data-cache-path", str(folder / "cache")]
        plan = folder / "own-plan.txt"
        checkpoint = ["--save-interval", "2", "--save", str(folder / "checkpoint"), "--exit-interval", "2"]
        self.argv: dict[str, list[str]] = {
            "tp": [*common, *TP2],
            "tp windows": [*common, *TP2, *LYNX, "--lynx-planner", "windows"],
            "tp heu": [*common, *TP2, *LYNX, "--lynx-planner", "heu", "--lynx-budget", "BUDGET"],
            "tp opt": [*common, *TP2, *LYNX, "--lynx-budget", "BUDGET"],
            "tp full": [*common, *TP2, *LYNX, "--lynx-planner", "full-uniform-2"],
            "tp alone": [*common, *TP2, *LYNX],
            "tp plan": [*common, *TP2, *LYNX, "--lynx-plan", str(plan)],
            "tp killed": [*common, *TP2, *LYNX, "--lynx-plan", str(plan), *checkpoint],
            "tp restarted": [
                *(*common, *TP2, *LYNX, "--lynx-plan", str(plan)),
                *("--load", str(folder / "checkpoint")),
            ],
            "sp": [*common, *TP2, *LLAMA, "--sequence-parallel", "--bf16"],
            "sp opt": [
                *(*common, *TP2, *LLAMA, "--sequence-parallel", "--bf16"),
                *(*LYNX, "--lynx-budget", "BUDGET"),
            ],
            "pp": [*common, *PP2],
            "pp opt": [*common, *PP2, *LYNX, "--lynx-budget", "BUDGET"],
            "vpp": [*common, *VPP2],
            "vpp opt": [*common, *VPP2, *LYNX, "--lynx-budget", "BUDGET"],
            "tp+pp": [*common, *TP2_PP2],
            "tp+pp opt": [*common, *TP2_PP2, *LYNX, "--lynx-budget", "BUDGET"],
        }
        self._budgets = {"tp": "4.2MiB", "sp": "2.6MiB", "pp": "4.6MiB", "vpp": "4.6MiB", "tp+pp": "2.4MiB"}
        self._own_plan = plan
        self._found: dict[str, list[Found]] = {}
        self._launched: set[int] = set()

    def found(self, name: str) -> list[Found]:
        """What each rank found in a run; ``KeyError`` after a launch that failed."""
        four = [name for name in self.argv if name.startswith("tp+pp")]
        world_size = 4 if name in four else 2
        if world_size not in self._launched:
            self._launched.add(world_size)
            if world_size == 4:
                self._launch(four, 4)
            else:
                self._launch(["tp windows"], 2)
                self._own_plan.write_text(str(_moved(self.plan("tp windows"))))
                self._launch([name for name in self.argv if name not in (*four, "tp windows")], 2)
        return self._found[name]

    def _launch(self, names: list[str], world_size: int) -> None:
        payload: list[Run] = []
        for name in names:
            budget = self._budgets[name.split()[0]]
            argv = [budget if word == "BUDGET" else word for word in self.argv[name]]
            if "lynx" in argv:
                argv += ["--lynx-report", str(self._path(name) / "report")]
            payload.append((str(self._path(name)), argv))
        by_rank = run_ranks(world_size, f"{__name__}:train", payload, timeout_s=500)
        self._found |= {name: list(ranks) for name, *ranks in zip(names, *by_rank, strict=True)}

    def _path(self, name: str) -> Path:
        return self._folder / name.replace(" ", "_")

    def losses(self, name: str) -> list[float]:
        """The loss of each step, all digits, from the last rank."""
        last = len(self.found(name)) - 1
        lines = (self._path(name) / f"rank{last}.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def report(self, name: str) -> Path:
        """The run's report."""
        self.found(name)
        return self._path(name) / "report"

    def plan(self, name: str) -> Plan:
        """The plan that the run reported."""
        return parse_plan((self.report(name) / "plan.txt").read_text())

    def steps(self, name: str, rank: int) -> list[dict[str, Any]]:
        """The run's report of one rank."""
        lines = (self.report(name) / f"steps.{rank}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def _moved(plan: Plan) -> Plan:
    """A plan of our own for the same job: everything that may be is rebuilt in backward windows.

    In layer 1 the end of the attention is run again on demand, before the window that is to rebuild the
    mask inside it: the mask must wait for its window.
    """
    attention = ("input_layernorm", "linear_qkv", "core_attention", "self_attn_dropout")
    mlp = ("pre_mlp_layernorm", "linear_fc1", "activation", "mlp_dropout")
    layers = []
    for layer in range(4):
        choices: list[tuple[str, Choice]] = [(name, Window("bwd", layer, "linear_fc1")) for name in attention]
        later: Choice = Window("bwd", layer + 1, "linear_qkv") if layer < 3 else Window("head")
        if layer == 1:
            later = "demand"
            choices.append(("self_attn_bda", later))
        choices += [(name, later) for name in mlp]
        layers.append(LayerPlan(layer=layer, choices=tuple(choices)))
    stage = StagePlan(stage=0, chunks=((0, 1, 2, 3),), layers=tuple(layers))
    return Plan(planner="own", fingerprint=plan.fingerprint, stages=(stage,))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("lynx"))


LYNX_RUNS = [
    "tp windows",
    "tp heu",
    "tp opt",
    "tp full",
    "tp alone",
    "tp plan",
    "sp opt",
    "pp opt",
    "vpp opt",
    "tp+pp opt",
]


@pytest.mark.parametrize("name", LYNX_RUNS)
def test_losses_are_those_of_stock_megatron(runs: Runs, name: str) -> None:
    stock = runs.losses(name.split()[0])
    assert len(stock) == STEPS
    assert runs.losses(name) == stock


@pytest.mark.parametrize("name", LYNX_RUNS)
def test_gradients_are_those_of_stock_megatron(runs: Runs, name: str) -> None:
    stock = [found.gradients for found in runs.found(name.split()[0])]
    assert all(len(set(gradients)) == STEPS for gradients in stock)
    assert [found.gradients for found in runs.found(name)] == stock


def test_a_restarted_run_continues_as_an_uninterrupted_one(runs: Runs) -> None:
    assert runs.losses("tp killed") + runs.losses("tp restarted") == runs.losses("tp")


@pytest.mark.parametrize("name", [name for name in LYNX_RUNS if name != "tp full"])
def test_the_tape_counts_what_the_plan_says(runs: Runs, name: str) -> None:
    """Kept bytes of each layer, and bytes rebuilt in each window, equal the plan and the graph.

    ``full`` is left out: a dropped layer input is rebuilt by the layer before, which the graph of
    one layer does not describe.
    """
    plan = runs.plan(name)
    assert name in ("tp windows", "tp alone") or any(one.choices for stage in plan for one in stage.layers)
    for rank, found in enumerate(runs.found(name)):
        graph = found.graph
        assert graph is not None
        stage = next(s for s in plan if [layer.layer for layer in s.layers] == found.layers)
        planned: Counter[str] = Counter()
        for layer in stage.layers:
            for region, choice in layer.choices:
                planned[str(choice)] += found.microbatches * graph.rebuilt_bytes(region, layer.dropped)
        for step in runs.steps(name, rank):
            kept = {layer.layer: graph.kept_bytes(layer.dropped) for layer in stage.layers}
            assert {int(k): v for k, v in step["kept_bytes"].items()} == kept
            assert step["left_bytes"] == 0
            counted = Counter({window: one["size_bytes"] for window, one in step["windows"].items()})
            counted["demand"] = step["rebuilt_bytes"].get("demand", 0)
            # The cooldown has stalls where the steady state has forward windows.
            assert counted.total() == planned.total()
            for window in counted.keys() | planned.keys():
                if window.startswith(("bwd", "head")) or name == "pp opt":
                    assert counted[window] == planned[window], window
            assert counted["demand"] >= planned["demand"]
            if name == "pp opt":
                # Two balanced stages: the first one's stall was filled, and nothing in it is late.
                assert (counted["stall"] > 0) == (rank == 0)


def test_a_plan_of_our_own_rebuilds_on_demand_only_what_it_says(runs: Runs) -> None:
    found, plan = runs.found("tp plan")[0], runs.plan("tp plan")
    assert found.graph is not None
    layer = plan.stages[0].layer(1)
    said = sum(
        found.graph.rebuilt_bytes(n, layer.dropped) for n, choice in layer.choices if choice == "demand"
    )
    for rank in range(2):
        for step in runs.steps("tp plan", rank):
            assert step["rebuilt_bytes"]["bwd"] > 0
            assert step["rebuilt_bytes"]["head"] > 0
            assert step["rebuilt_bytes"]["demand"] == found.microbatches * said > 0


@pytest.mark.parametrize("name", [name for name in LYNX_RUNS if name not in ("tp full", "tp plan")])
def test_lynx_report_sets_the_plan_beside_the_run(runs: Runs, name: str) -> None:
    """What was planned happened: kept bytes, openings of windows in the backward, bytes rebuilt in them."""
    found = measured(read_report(runs.report(name)))
    assert found["clock"] == "host"
    assert [stage["stage"] for stage in found["stages"]] == list(range(len(runs.plan(name).stages)))
    for stage in found["stages"]:
        sums = {row["name"]: row for row in stage["sums"]}
        assert sums["kept by a microbatch"]["measured"] == sums["kept by a microbatch"]["planned"]
        assert sums["schedule"]["measured"] > sums["rebuilt in windows"]["measured"]
        for row in stage["windows"]:
            if row["kind"] == "bwd" or (row["kind"] == "stall" and name == "pp opt"):
                assert row["measured"]["opened"] == row["planned"]["opened"]
                assert row["measured"]["bytes"] == row["planned"]["bytes"]
                assert row["measured"]["work_ns"] > 0


def test_an_unmodified_script_takes_the_flag(tmp_path: Path) -> None:
    """``lynx run`` on a script that knows nothing of lynx; wrong flags are one line and exit code 2."""
    script = tmp_path / "script.py"
    script.write_text(
        "from megatron_lynx.integration import pretrain\n"
        "if __name__ == '__main__':\n"
        "    pretrain.train(pretrain.parse(None))\n"
    )
    mock = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--eval-iters", "0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "megatron_lynx", "run", str(script), *MODEL, *CPU_FLAGS, *mock, *TP2]
    environment = {**os.environ, "MEGATRON_LYNX_CPU": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}

    def ran(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *flags], env=environment, capture_output=True, text=True, timeout=300
        )

    done = ran(*LYNX, "--lynx-planner", "selective")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "> lynx: planner selective: 4 regions of 4 layers" in done.stdout
    refused = ran(*LYNX, "--recompute-granularity", "selective")
    assert refused.returncode != 0
    assert (
        "lynx run: error: --recompute-method lynx does not work with --recompute-granularity"
        in refused.stderr
    )
