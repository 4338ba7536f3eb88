"""``--recompute-method lynx`` in Megatron's own trainer: same losses, plans carried out as written."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.cli.run_files import measured, read_report
from megatron_lynx.graph import LayerGraph
from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
from megatron_lynx.plan import LayerPlan, Plan, StagePlan, Window, parse_plan
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, LLAMA, MODEL
from tests.support.launch import REPOSITORY, run_ranks

LAYERS = ("--num-layers", "4")
TP2 = (*LAYERS, "--tensor-model-parallel-size", "2")
PP2 = (*LAYERS, "--pipeline-model-parallel-size", "2")
# Middle chunks get no attention mask from the data, and would make one that the graph leaves out.
OWN_MASK = "--no-create-attention-mask-in-dataloader"
VPP2 = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1", OWN_MASK)
LYNX = ("--recompute-method", "lynx")
MICROBATCHES = 2
STEPS = 4

Run = tuple[str, list[str]]


def train(rank: int, world_size: int, payload: list[Run]) -> list[tuple[LayerGraph | None, list[int]]]:
    """Run the entry's parts with each argument list; returns what the layers' graph was."""
    from megatron.training import get_args
    from megatron.training.training import destroy_global_state

    from megatron_lynx.gpt import layer_graph
    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.describe import batch_of, model_of, parallel_of
    from megatron_lynx.integration.recorder import recorder_if_requested
    from megatron_lynx.integration.trainer import lynx_trainer

    graphs: list[tuple[LayerGraph | None, list[int]]] = []
    for record, argv in payload:
        os.environ["MEGATRON_LYNX_RECORD"] = record
        with contextlib.suppress(SystemExit), recorder_if_requested(), lynx_trainer() as trainer:
            args = pretrain.parse(argv)
            keep = trainer.bind

            def bind(chunks: Any, keep: Any = keep) -> None:
                keep(chunks)
                session = trainer.session
                if session is None:
                    graphs.append((None, []))
                    return
                args = get_args()
                import torch

                model = model_of(args, session.config, torch.device("cpu"))
                graph = layer_graph(model, parallel_of(args), batch_of(args))
                graphs.append((graph, [layer.layer for layer in session.executor.plan.layers]))

            trainer.bind = bind  # type: ignore[method-assign]
            pretrain.train(args)
        destroy_global_state()
    return graphs


class Runs:
    """Many runs in one launch of two ranks."""

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
        }
        self._budgets = {"tp": "4.2MiB", "sp": "2.6MiB", "pp": "4.6MiB", "vpp": "4.6MiB"}
        first = self._launch(["tp windows"])
        plan.write_text(str(_moved(self.plan("tp windows"))))
        self.graphs = dict(zip(["tp windows"], first, strict=True))
        rest = [name for name in self.argv if name != "tp windows"]
        self.graphs |= dict(zip(rest, self._launch(rest), strict=True))

    def _launch(self, names: list[str]) -> list[list[tuple[LayerGraph | None, list[int]]]]:
        payload: list[Run] = []
        for name in names:
            budget = self._budgets[name.split()[0]]
            argv = [budget if word == "BUDGET" else word for word in self.argv[name]]
            if "lynx" in argv:
                argv += ["--lynx-report", str(self._path(name) / "report")]
            payload.append((str(self._path(name)), argv))
        by_rank = run_ranks(2, f"{__name__}:train", payload, timeout_s=500)
        return [list(ranks) for ranks in zip(*by_rank, strict=True)]

    def _path(self, name: str) -> Path:
        return self._folder / name.replace(" ", "_")

    def losses(self, name: str) -> list[float]:
        """The loss of each step, all digits, from the last rank."""
        lines = (self._path(name) / "rank1.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def report(self, name: str) -> Path:
        """The run's report."""
        return self._path(name) / "report"

    def plan(self, name: str) -> Plan:
        """The plan that the run reported."""
        return parse_plan((self.report(name) / "plan.txt").read_text())

    def steps(self, name: str, rank: int) -> list[dict[str, Any]]:
        """The run's report of one rank."""
        lines = (self._path(name) / "report" / f"steps.{rank}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def _moved(plan: Plan) -> Plan:
    """A plan of our own for the same job: everything that may be is rebuilt in backward windows."""
    attention = ("input_layernorm", "linear_qkv", "core_attention", "self_attn_dropout")
    mlp = ("pre_mlp_layernorm", "linear_fc1", "activation", "mlp_dropout")
    layers = []
    for layer in range(4):
        later = Window("bwd", layer + 1, "linear_qkv") if layer < 3 else Window("head")
        choices = [(name, Window("bwd", layer, "linear_fc1")) for name in attention]
        layers.append(LayerPlan(layer=layer, choices=(*choices, *((name, later) for name in mlp))))
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
]


@pytest.mark.parametrize("name", LYNX_RUNS)
def test_losses_are_those_of_stock_megatron(runs: Runs, name: str) -> None:
    stock = runs.losses(name.split()[0])
    assert len(stock) == STEPS
    assert runs.losses(name) == stock


def test_a_restarted_run_continues_as_an_uninterrupted_one(runs: Runs) -> None:
    assert runs.losses("tp killed") + runs.losses("tp restarted") == runs.losses("tp")


@pytest.mark.parametrize("name", [name for name in LYNX_RUNS if name != "tp full"])
def test_the_tape_counts_what_the_plan_says(runs: Runs, name: str) -> None:
    """Kept bytes of each layer, and bytes rebuilt by kind of window, equal the plan and the graph.

    ``full`` is left out: a dropped layer input is rebuilt by the layer before, which the graph of
    one layer does not describe.
    """
    plan = runs.plan(name)
    assert name in ("tp windows", "tp alone") or any(one.choices for stage in plan for one in stage.layers)
    for rank, (graph, layers) in enumerate(runs.graphs[name]):
        assert graph is not None
        stage = next(s for s in plan if [layer.layer for layer in s.layers] == layers)
        planned: Counter[str] = Counter()
        for layer in stage.layers:
            for region, choice in layer.choices:
                kind = choice.kind if isinstance(choice, Window) else "demand"
                planned[kind] += MICROBATCHES * graph.rebuilt_bytes(region, layer.dropped)
        for step in runs.steps(name, rank):
            kept = {layer.layer: graph.kept_bytes(layer.dropped) for layer in stage.layers}
            assert {int(k): v for k, v in step["kept_bytes"].items()} == kept
            assert step["left_bytes"] == 0
            counted = Counter(step["rebuilt_bytes"])
            # The cooldown has stalls where the steady state has forward windows.
            assert sum(counted.values()) == sum(planned.values())
            assert counted["bwd"] == planned["bwd"]
            assert counted["head"] == planned["head"]
            assert counted["demand"] >= planned["demand"]


def test_a_plan_of_windows_alone_rebuilds_nothing_on_demand(runs: Runs) -> None:
    for rank in range(2):
        for step in runs.steps("tp plan", rank):
            assert step["rebuilt_bytes"]["bwd"] > 0
            assert step["rebuilt_bytes"]["head"] > 0
            assert not step["rebuilt_bytes"].get("demand")


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
            if row["kind"] == "bwd":
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
