"""A tree of each release with ``lynx patch`` in it trains as it did, under a plan too, and is itself again
after ``revert``; scripts that lynx cannot train say so by name.

The trees are the wheels' files and scripts of our own: upstream's scripts are in no wheel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
import shutil
from pathlib import Path

import pytest

from megatron_lynx.cli.main import main
from megatron_lynx.integration.dataset import build_dataset, dataset_arguments
from tests.megatron_cpu.job_ranks import ScriptRun
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, MODEL
from tests.megatron_cpu.test_versions import wheel
from tests.support.launch import run_ranks

STEPS = 4
LYNX = ("--recompute-method", "lynx")
SIZES = {
    "tp": (("--tensor-model-parallel-size", "2"), "3.9MiB"),
    "pp": (("--pipeline-model-parallel-size", "2"), "4.3MiB"),
}
INTERLEAVED = (*SIZES["pp"][0], "--num-layers-per-virtual-pipeline-stage", "1")
GPT = """
from megatron_lynx.integration import pretrain

if __name__ == "__main__":
    # Optionally enable inprocess restart on pretrain
    pretrain.train(pretrain.parse(None))
"""
TWICE = """
from megatron_lynx.integration import entry, pretrain

entry.enter()
entry.enter()
pretrain.train(pretrain.parse(None))
"""
OTHER_MODEL = """
from megatron.core.enums import ModelType
from megatron.core.models.{module} import {name}
from megatron.core.models.{spec} import {layers}
from megatron.training import arguments, get_args, training

def provide(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    return {call}

if __name__ == "__main__":
    training.pretrain(None, provide, ModelType.encoder_or_decoder, None, args_defaults={{}})
"""
BERT = OTHER_MODEL.format(
    module="bert.bert_model",
    name="BertModel",
    spec="bert.bert_layer_specs",
    layers="bert_layer_local_spec",
    call="BertModel(config, 0, bert_layer_local_spec, args.padded_vocab_size, 64)",
)
T5 = OTHER_MODEL.format(
    module="T5",
    name="T5Model",
    spec="T5.t5_spec",
    layers="get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec",
    call="T5Model(config, config, get_t5_encoder_with_local_block_spec(4),"
    " get_t5_decoder_with_local_block_spec(4), args.padded_vocab_size, 64)",
)


def tree_of(version: str, folder: Path) -> Path:
    """A copy of a release as ``pip`` installs it, with scripts as a checkout has them."""
    if version == "0.19":
        found = importlib.util.find_spec("megatron.core")
        assert found is not None
        assert found.submodule_search_locations
        shutil.copytree(Path(next(iter(found.submodule_search_locations))).parent, folder / "megatron")
    else:
        shutil.copytree(wheel(version), folder)
    scripts = {"gpt": GPT, "copy": GPT, "twice": TWICE, "bert": BERT, "t5": T5}
    for name, text in scripts.items():
        (folder / f"pretrain_{name}.py").write_text(text)
    return folder


def hashes(tree: Path) -> dict[Path, str]:
    """The hash of every file of a tree that Python did not write."""
    files = [path for path in tree.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(tree): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Patched:
    """A patched tree, and all that was run in it, in one launch."""

    def __init__(self, version: str, folder: Path) -> None:
        self.folder = folder
        self.tree = tree_of(version, folder / "tree")
        self.before = hashes(self.tree)
        assert main(["patch", "apply", str(self.tree)]) == 0
        self.patched = hashes(self.tree)
        prefix = build_dataset(folder / "data" / "text", size_bytes=100_000)
        data = [*dataset_arguments(prefix), "--split", "100,0,0", "--eval-iters", "0", "--num-workers", "0"]
        self._common = [
            *MODEL,
            "--num-layers",
            "4",
            *CPU_FLAGS,
            *data,
            "--data-cache-path",
            f"{folder}/cache",
        ]
        self._runs: dict[str, ScriptRun] = {}
        for name, (sizes, budget) in SIZES.items():
            plan = [*LYNX, "--lynx-plan", self._plan(name, sizes, budget)]
            self._add(name, "gpt", *sizes)
            self._add(f"{name} lynx", "gpt", *sizes, *plan, "--lynx-report", str(folder / f"{name}-report"))
            self._add(f"{name} run", "gpt", *sizes, *plan, through=("lynx", "run"))
        self._add("twice", "twice", *SIZES["tp"][0], *LYNX, "--lynx-planner", "selective")
        (folder / "model.yaml").write_text("language_model:\n  recompute_method: lynx\n")
        yaml = ("--yaml-cfg", str(folder / "model.yaml"))
        self._add("interleaved", "gpt", *INTERLEAVED, *LYNX)
        self._add("copy", "copy", *LYNX)
        self._add("yaml", "gpt", *yaml)
        self._add("yaml and flag", "gpt", *yaml, *LYNX)
        self._add("yaml, run", "copy", *yaml, through=("lynx", "run"))
        if version == "0.17.1":
            self._add("bert", "bert", *LYNX, through=("lynx", "run"))
            self._add("t5", "t5", *LYNX, through=("lynx", "run"))
        runs = [*self._runs.values()]
        by_rank = run_ranks(
            2, "tests.megatron_cpu.job_ranks:run_scripts", runs, timeout_s=300, megatron=self.tree
        )
        self.ended: dict[str, list[str]] = {
            name: list(ended) for name, *ended in zip(self._runs, *by_rank, strict=True)
        }

    def _plan(self, name: str, sizes: tuple[str, ...], budget: str) -> str:
        """A plan made from the command line, as ``lynx plan`` makes it."""
        script, plan = self.folder / f"{name}.sh", self.folder / f"{name}-plan.txt"
        script.write_text(
            f"torchrun --nproc-per-node 2 pretrain_gpt.py {shlex.join([*self._common, *sizes])}\n"
        )
        made = ["plan", "--from-args", str(script), "--cluster", "toy", "--budget", budget]
        assert main([*made, "--planner", "heu", "--output", str(plan)]) == 0
        return str(plan)

    def _add(self, name: str, script: str, *flags: str, through: tuple[str, ...] = ()) -> None:
        words = (*through, str(self.tree / f"pretrain_{script}.py"), *self._common, *flags)
        self._runs[name] = ScriptRun(self.folder / "runs" / name.replace(" ", "_"), words)

    def losses(self, name: str) -> list[float]:
        """The loss of each step, all digits."""
        path = self._runs[name].folder / "rank1.jsonl"
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []

    def gradients(self, name: str) -> list[list[str]]:
        """By rank, the hash of every step's gradients."""
        return [(self._runs[name].folder / f"gradients.{rank}").read_text().split() for rank in range(2)]

    def log(self, name: str) -> str:
        """What the first rank printed."""
        return (self._runs[name].folder / "log.0").read_text()


@pytest.fixture(scope="module", params=["0.17.1", "0.18.2", "0.19"])
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Patched:
    return Patched(request.param, tmp_path_factory.mktemp("patched"))


def test_a_patched_script_trains_under_a_plan_as_it_does_without(patched: Patched) -> None:
    """By itself and through ``lynx run``."""
    for name in SIZES:
        stock = patched.losses(name)
        assert len(set(stock)) == STEPS
        assert len(set(patched.gradients(name)[0])) == STEPS
        for ran in (f"{name} lynx", f"{name} run"):
            assert patched.ended[ran] == ["", ""], ran
            assert patched.losses(ran) == stock, ran
            assert patched.gradients(ran) == patched.gradients(name), ran
        steps = (patched.folder / f"{name}-report" / "steps.0.jsonl").read_text().splitlines()
        assert len(steps) == STEPS
        assert all(sum(json.loads(step)["rebuilt_bytes"].values()) > 0 for step in steps)


def test_to_enter_twice_is_to_enter_once(patched: Patched) -> None:
    assert patched.ended["twice"] == ["", ""]
    assert patched.losses("twice") == patched.losses("tp")
    assert patched.log("twice").count("> lynx: planner selective") == 1


def test_a_script_that_does_not_enter_lynx_refuses_the_flag(patched: Patched) -> None:
    assert patched.ended["copy"] == ["SystemExit: 2"] * 2
    assert "--recompute-method lynx: this script does not enter megatron_lynx" in patched.log("copy")
    assert patched.losses("copy") == []


def test_a_yaml_file_is_refused_by_name(patched: Patched) -> None:
    """In the file, and beside it; and through ``lynx run``."""
    says = f"--recompute-method lynx does not work with --yaml-cfg {patched.folder}/model.yaml; flags"
    for name in ("yaml", "yaml and flag"):
        assert all(error.startswith(f"ConfigError: {says}") for error in patched.ended[name])
    assert patched.ended["yaml, run"] == ["SystemExit: 2"] * 2
    assert f"lynx run: error: {says}" in patched.log("yaml, run")


def test_an_interleaved_schedule_trains_where_stock_can_be_relied_on(patched: Patched) -> None:
    old = "0.17.1" in patched.log("tp lynx").split("> lynx: ")[1].splitlines()[0]
    error = patched.ended["interleaved"]
    if old:
        flag = "--num-layers-per-virtual-pipeline-stage 1"
        assert all(f"--recompute-method lynx does not work with {flag} here" in one for one in error)
        assert "its own losses differ from run to run; 0.18 works" in error[0]
        assert patched.losses("interleaved") == []
    else:
        assert error == ["", ""]
        assert len(patched.losses("interleaved")) == STEPS


def test_models_that_lynx_does_not_know_are_named(patched: Patched) -> None:
    for script, model in (("bert", "BertModel"), ("t5", "T5Model")):
        if script in patched.ended:
            reason = f"--recompute-method lynx trains GPTModel; pretrain_{script}.py builds {model}"
            assert patched.ended[script] == ["SystemExit: 2"] * 2
            assert f"lynx run: error: {reason}: --recompute-granularity" in patched.log(script)


def test_revert_leaves_the_tree_as_it_was(patched: Patched) -> None:
    """The last test of a tree: what was trained with has gone through Python's caches meanwhile."""
    assert hashes(patched.tree) == patched.patched
    assert patched.patched != patched.before
    assert main(["patch", "revert", str(patched.tree)]) == 0
    assert hashes(patched.tree) == patched.before
