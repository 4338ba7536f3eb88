"""``lynx doctor``: finds each of the planted faults, and nothing in healthy jobs."""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megatron_lynx.cli.doctor import examine
from megatron_lynx.cli.health.facts import Finding
from megatron_lynx.cli.health.machine import Gpu, Machine
from megatron_lynx.cli.main import main

GIB = 1 << 30
HEALTHY = Machine(
    torch="2.9.0+cu128",
    megatron="0.19.2",
    transformer_engine="2.9.0",
    transformer_engine_torch=True,
    gpus=(Gpu(total_bytes=80 * GIB, used_bytes=GIB // 2),) * 8,
    interfaces=("lo", "eth0", "ib0"),
)
NO_TE = replace(HEALTHY, transformer_engine=None, transformer_engine_torch=False)
CPUS = replace(NO_TE, gpus=())
LOCAL = ["--transformer-impl", "local", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"]
ON_CPU = [*LOCAL, *["--distributed-backend", "gloo", "--no-masked-softmax-fusion"]]
LYNX = ["--recompute-method", "lynx"]


@dataclass
class Trial:
    """A folder with what a job needs, and the job: the words after ``torchrun``'s."""

    folder: Path
    machine: Machine = HEALTHY
    ranks: str = "8"
    flags: dict[str, str | None] = field(default_factory=dict)
    script: str = "pretrain_gpt.py"

    def __post_init__(self) -> None:
        for name in ("text.bin", "text.idx", "vocab.json", "merges.txt"):
            (self.folder / name).touch()
        shape = "num-layers 24 hidden-size 2048 num-attention-heads 16 seq-length 2048"
        batch = "max-position-embeddings 2048 micro-batch-size 2 global-batch-size 32 lr 1e-4 train-iters 100"
        words = f"{shape} {batch} tensor-model-parallel-size 2 pipeline-model-parallel-size 2".split()
        self.flags = dict(zip(words[::2], words[1::2], strict=True))
        self.set("--bf16", "--tokenizer-type", "GPT2BPETokenizer", "--data-path", str(self.folder / "text"))
        self.set("--vocab-file", str(self.folder / "vocab.json"))
        self.set("--merge-file", str(self.folder / "merges.txt"))

    def set(self, *words: str) -> None:
        """Give flags, with at most one word each."""
        name = ""
        for word in words:
            if word.startswith("--"):
                self.flags[name := word[2:]] = None
            else:
                self.flags[name] = word

    def leave_out(self, *names: str) -> None:
        """Take flags back."""
        for name in names:
            del self.flags[name]

    def words(self) -> list[str]:
        """The command line."""
        given = [w for n, v in self.flags.items() for w in (f"--{n}", v) if w is not None]
        return ["torchrun", "--nproc-per-node", self.ranks, self.script, *given]

    def findings(self) -> list[Finding]:
        """What the doctor finds, Megatron's parser aside."""
        return examine(None, self.words(), self.machine, ask=lambda _: None)

    def checkpoint(self, sharding: str | None = None, **arguments: object) -> None:
        """Write a checkpoint's facts, and load it."""
        saved = {
            "num_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "train_iters": 100,
            "use_distributed_optimizer": sharding is not None,
        }
        folder = self.folder / "ckpt" / "iter_0000040"
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("40")
        state = {"args": Namespace(**{**saved, **arguments})}
        if sharding is not None:
            state["content_metadata"] = {"distrib_optim_sharding_type": sharding}  # type: ignore[assignment]
            self.set("--use-distributed-optimizer")
        with zipfile.ZipFile(folder / "common.pt", "w") as archive:
            archive.writestr("common/data.pkl", pickle.dumps(state))
        self.set("--load", str(folder.parent))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name in ("MEGATRON_LYNX_CPU", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)


Plant = Callable[[Trial, pytest.MonkeyPatch], object]


def on_machine(**changes: object) -> Plant:
    return lambda trial, _: setattr(trial, "machine", replace(trial.machine, **changes))  # type: ignore[arg-type]


def flags(*words: str) -> Plant:
    return lambda trial, _: trial.set(*words)


def without(*names: str) -> Plant:
    return lambda trial, _: trial.leave_out(*names)


def variable(name: str, value: str | None) -> Plant:
    return lambda _, patch: patch.delenv(name) if value is None else patch.setenv(name, value)


def saved(sharding: str | None = None, **arguments: object) -> Plant:
    return lambda trial, _: trial.checkpoint(sharding, **arguments)


def all_of(*plants: Plant) -> Plant:
    def plant(trial: Trial, patch: pytest.MonkeyPatch) -> None:
        for one in plants:
            one(trial, patch)

    return plant


def by(script: str) -> Plant:
    return lambda trial, _: setattr(trial, "script", script)


def made_plan(*changes: str) -> Plant:
    """A plan made by ``lynx plan`` for this job with some sizes changed."""

    def plant(trial: Trial, _: pytest.MonkeyPatch) -> None:
        path = str(trial.folder / "plan.txt")
        sizes = ["--num-layers", "24", "--hidden-size", "2048", "--num-attention-heads", "16"]
        sizes += [
            "--vocab-size",
            "50304",
            "--seq-length",
            "2048",
            "--micro-batch-size",
            "2",
            "--tp",
            "2",
            "--pp",
            "2",
        ]
        assert main(["plan", *sizes, "--planner", "windows", *changes, "--output", path]) == 0
        trial.set(*LYNX, "--lynx-plan", path, "--no-create-attention-mask-in-dataloader")

    return plant


def text_file(name: str, text: str) -> Plant:
    return lambda trial, _: (trial.folder / name).write_text(text)


def path_flag(flag: str, name: str) -> Plant:
    return lambda trial, _: trial.set(flag, str(trial.folder / name))


FULL = (Gpu(total_bytes=80 * GIB, used_bytes=GIB // 2), *[Gpu(total_bytes=80 * GIB, used_bytes=60 * GIB)] * 7)

FAULTS: dict[str, tuple[Plant, str, str]] = {
    "no torch": (on_machine(torch=None), "fail", "torch is not installed"),
    "no megatron": (on_machine(megatron=None), "fail", "megatron-core is not installed"),
    "old megatron": (on_machine(megatron="0.15.0"), "fail", "0.15.0 in  is older than what works"),
    "new megatron": (all_of(on_machine(megatron="0.21.0"), flags(*LYNX)), "warn", "0.21.0 was not tested"),
    "empty te wheel": (on_machine(transformer_engine_torch=False), "fail", "has no half for torch"),
    "no te": (on_machine(transformer_engine=None), "fail", "--transformer-impl local"),
    "no apex": (
        all_of(
            on_machine(transformer_engine=None, transformer_engine_torch=False),
            flags("--transformer-impl", "local", "--no-persist-layer-norm"),
        ),
        "fail",
        "--no-gradient-accumulation-fusion",
    ),
    "no psutil": (all_of(on_machine(psutil=False), flags("--save", "ckpt")), "fail", "pip install psutil"),
    "connections": (
        all_of(variable("CUDA_DEVICE_MAX_CONNECTIONS", None), flags("--sequence-parallel")),
        "fail",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    "world size": (flags("--pipeline-model-parallel-size", "3"), "fail", "8 ranks are no multiple "
    "of TP 2 x PP 3 = 6; 6"),
    "more ranks than GPUs": (on_machine(gpus=HEALTHY.gpus[:4]), "fail", "this one has 4 GPUs"),
    "batch": (flags("--global-batch-size", "30"), "fail", "--global-batch-size 32 works"),
    "heads": (flags("--num-attention-heads", "15"), "fail", "15 is no multiple of "
    "--tensor-model-parallel-size 2"),
    "layers": (flags("--num-layers", "23"), "fail", "--num-layers 23 leaves 23 layers for 2"),
    "layout": (flags("--pipeline-model-parallel-layout", "Et*11|t*12L"), "fail", "23"),
    "positions": (flags("--max-position-embeddings", "1024"), "fail", "1024 is below --seq-length 2048"),
    "no learning rate": (without("lr"), "fail", "--lr is missing"),
    "no data": (flags("--data-path", "nowhere/text"), "fail", "there is no file"),
    "no vocabulary": (flags("--vocab-file", "nowhere.json"), "fail", "--vocab-file nowhere.json: "
    "there is no such file"),
    "tokenizer that downloads": (without("vocab-file"), "warn", "--vocab-file FILE works offline"),
    "no tokenizer": (without("tokenizer-type"), "warn", "--tokenizer-type is not given"),
    "save into a file": (all_of(text_file("ckpt", ""), path_flag("--save", "ckpt")), "fail", "is a "
    "file; a folder works"),
    "no plan": (flags(*LYNX, "--lynx-plan", "nowhere.txt"), "fail", "nowhere.txt: there is no such file"),
    "plan of another job": (made_plan("--hidden-size", "1024"), "fail", "was made for another job"),
    "plan with other stages": (made_plan("--pp", "4"), "fail", "has 4 stages"),
    "profile that is none": (
        all_of(flags(*LYNX), text_file("costs.json", "[]"), path_flag("--lynx-profile", "costs.json")),
        "fail",
        "is not a table of costs",
    ),
    "flags without the method": (flags("--lynx-budget", "40GiB"), "fail", "needs --recompute-method lynx"),
    "refused beside lynx": (flags(*LYNX, "--num-experts", "8"), "fail", "--num-experts 8"),
    "planned as it begins": (
        flags(*LYNX, "--context-parallel-size", "2", "--global-batch-size", "32"),
        "warn",
        "--context-parallel-size 2: the plan is not checked here",
    ),
    "too little memory": (flags(*LYNX, "--lynx-budget", "2GiB"), "fail", "nothing fits"),
    "device in use": (on_machine(gpus=FULL), "warn", "60.00 GiB of 80.00 GiB on GPU 1 are taken"),
    "split of the checkpoint": (
        all_of(saved("dp_reshardable"), flags("--pipeline-model-parallel-layout", "Et*13|t*11L")),
        "fail",
        "--dist-ckpt-optim-fully-reshardable",
    ),
    "checkpoint of another model": (saved(hidden_size=1024), "fail", "--hidden-size 1024, not 2048"),
    "longer run": (saved(train_iters=50), "fail", "--override-opt-param-scheduler"),
    "dropout over a changed PP": (saved(pipeline_model_parallel_size=4), "warn", "dropout draws other masks"),
    "checkpoint that is not there": (flags("--load", "nowhere"), "warn", "starts from random weights"),
    "interface": (variable("NCCL_SOCKET_IFNAME", "eth7"), "fail", "no interface eth7 here; there "
    "are lo, eth0, ib0"),
    "gloo's interface": (variable("GLOO_SOCKET_IFNAME", "eth"), "fail", "no interface eth here"),
    "cpu backend beside GPUs": (variable("MEGATRON_LYNX_CPU", "1"), "fail", "where there are GPUs"),
    "script of another model": (
        all_of(by("examples/pretrain_t5.py"), flags(*LYNX)),
        "fail",
        "pretrain_t5.py builds another model",
    ),
    "blocking launches": (variable("CUDA_LAUNCH_BLOCKING", "1"), "warn", "nothing overlaps"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, level, says = FAULTS[name]
    trial = Trial(tmp_path)
    plant(trial, monkeypatch)
    found = [finding for finding in trial.findings() if says in finding.text]
    assert [finding.level for finding in found] == [level], trial.findings()


def on_cpus(trial: Trial, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("MEGATRON_LYNX_CPU", "1")
    trial.machine = CPUS
    trial.set(*ON_CPU, *LYNX)


HEALTHY_JOBS: dict[str, Plant] = {
    "stock": flags("--use-distributed-optimizer", "--sequence-parallel"),
    "lynx": flags(*LYNX, "--lynx-budget", "60GiB"),
    "plan": made_plan(),
    "local layers": all_of(lambda t, _: setattr(t, "machine", NO_TE), flags(*LOCAL, *LYNX)),
    "resumed": all_of(
        saved("dp_reshardable"), flags("--override-opt-param-scheduler", "--train-iters", "300")
    ),
    "moved layers": all_of(
        saved("fully_reshardable"), flags("--pipeline-model-parallel-layout", "Et*13|t*11L", *LYNX)
    ),
    "llama": all_of(
        without("vocab-file", "merge-file"),
        flags("--tokenizer-type", "NullTokenizer", "--vocab-size", "32000"),
        flags("--swiglu", "--normalization", "RMSNorm"),
        flags("--group-query-attention", "--num-query-groups", "4", "--position-embedding-type", "rope"),
        flags("--untie-embeddings-and-output-weights", "--disable-bias-linear", *LYNX),
        variable("NCCL_SOCKET_IFNAME", "ib"),
    ),
    "cpus": on_cpus,
    "another model's flags": all_of(
        by("pretrain_t5.py"),
        without("num-layers", "seq-length"),
        flags("--encoder-num-layers", "24", "--encoder-seq-length", "512", "--decoder-seq-length", "128"),
    ),
    "a loader of its own": all_of(
        by("examples/multimodal/train.py"),
        flags("--dataloader-type", "external", "--data-path", "blend.yaml"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY_JOBS)
def test_nothing_is_found_in_a_healthy_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trial = Trial(tmp_path)
    HEALTHY_JOBS[name](trial, monkeypatch)
    assert trial.findings() == []


def test_there_are_enough_of_both() -> None:
    assert len(FAULTS) >= 25
    assert len(HEALTHY_JOBS) >= 8


def test_a_script_is_read_like_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tmp_path)
    trial.set("--global-batch-size", "30")
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\nexport NCCL_SOCKET_IFNAME=eth7\n" + " ".join(trial.words()) + "\n")
    found = examine(str(script), None, HEALTHY, ask=lambda _: None)
    assert [f.text.split()[0] for f in found] == [
        "--global-batch-size",
        "NCCL_SOCKET_IFNAME=eth7:",
    ]


def test_flags_of_a_scripts_own_are_no_failure(tmp_path: Path) -> None:
    """Megatron's parser does not know them; the script may."""
    says = "Megatron's parser: unrecognized arguments: --freeze-ViT"
    for script, level in (("train_vlm.py", "warn"), ("pretrain_gpt.py", "fail")):
        words = Trial(tmp_path, script=script).words()
        found = examine(None, words, HEALTHY, ask=lambda _: says)
        assert [(one.level, one.text.startswith(says)) for one in found] == [(level, True)]


def test_one_line_a_finding_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--", "--num-layers", "24"]) == 1
    out = capsys.readouterr()
    assert all(line.startswith(("fail: ", "warn: ")) for line in out.out.splitlines())
    assert "would fail" in out.err
    assert main(["doctor"]) == 2
    assert "lynx doctor train.sh" in capsys.readouterr().err
