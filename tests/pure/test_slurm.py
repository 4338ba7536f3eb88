"""The launch scripts, with stubs in SLURM's place: what they ask for, what they refuse."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lynx.cli.main import main
from tests.support.slurm import SCRIPTS, call

TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "50257")
SIZES = {
    "gpt-1.3b": (2, 4),
    "gpt-2.7b": (2, 4),
    "gpt-4.7b": (4, 4),
    "gpt-7b": (4, 4),
    "gpt-13b": (4, 8),
    "gpt-20b": (8, 4),
    "gpt-23b": (8, 5),
}


def words(folder: Path) -> list[str]:
    """The words that every rank would run, srun's own before them."""
    return (folder / "out").read_text().splitlines()


@pytest.mark.parametrize("path", sorted(SCRIPTS.iterdir()), ids=lambda path: path.name)
def test_scripts_parse_and_say_what_they_need(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    if path.name == "lynx.sh":  # sourced
        return
    called = subprocess.run(["bash", str(path)], capture_output=True, text=True)
    assert called.returncode == 2
    assert "needs" in called.stderr
    assert "for example" in called.stderr


@pytest.mark.parametrize("script", ["train.sbatch", "profile.sbatch"])
def test_one_rank_a_gpu_with_the_flags_of_the_run(script: str, tmp_path: Path) -> None:
    done = call(
        *(script, "gpt-7b", "out file", *TOKENIZER, "--train-iters", "7"),
        python=sys.executable,
        folder=tmp_path,
        nodes=4,
        SLURM_GPUS_ON_NODE="4",
    )
    assert done.returncode == 0, done.stderr
    found = words(tmp_path)
    assert found[: found.index("bash")] == [
        *("--nodes", "4", "--ntasks-per-node", "4", "--gpus-per-node=4", "--kill-on-bad-exit=1"),
    ]
    assert found[found.index("--tensor-model-parallel-size") + 1] == "4"
    assert found[-2:] == ["--train-iters", "7"]  # the user's flags come last: they win
    assert "out file" in found
    assert found[found.index("--transformer-impl") + 1] == "transformer_engine"


def test_on_cpus_the_flags_are_those_of_cpus(tmp_path: Path) -> None:
    call(
        *("train.sbatch", "gpt-1.3b", "ckpt", *TOKENIZER),
        python=sys.executable,
        folder=tmp_path,
        MEGATRON_LYNX_CPU="1",
    )
    found = words(tmp_path)
    assert found[found.index("--distributed-backend") + 1] == "gloo"


def test_a_container_holds_everything_that_runs(tmp_path: Path) -> None:
    image = {"CONTAINER_IMAGE": "nvcr.io#nvidia/pytorch:25.04-py3", "CONTAINER_MOUNTS": "/data:/data"}
    call("train.sbatch", "gpt-1.3b", "ckpt", *TOKENIZER, python=sys.executable, folder=tmp_path, **image)
    found = words(tmp_path)
    assert f"--container-image={image['CONTAINER_IMAGE']}" in found[: found.index("bash")]
    assert "--container-mounts=/data:/data" in found[: found.index("bash")]


@pytest.mark.parametrize(
    ("given", "environment", "says"),
    [
        ((), {}, "needs --tokenizer-type"),
        (TOKENIZER, {"SLURM_GPUS_ON_NODE": ""}, "--gpus-per-node 8 works"),
        (TOKENIZER, {"RANKS_PER_NODE": "6"}, "--world-size 6 ranks are not a multiple of"),
    ],
)
def test_what_cannot_work_ends_before_the_ranks(
    tmp_path: Path, given: tuple[str, ...], environment: dict[str, str], says: str
) -> None:
    done = call("train.sbatch", "gpt-7b", "c", *given, python=sys.executable, folder=tmp_path, **environment)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_job_that_was_told_to_save_is_queued_again(tmp_path: Path) -> None:
    """Only if it has got further, and only while there is something left to train."""
    saved = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    saved.parent.mkdir()
    tools = tmp_path / "tools"

    def train(before: str, after: str) -> str:
        saved.write_text(before)
        (tmp_path / "after").write_text(after)
        return call(
            *("train.sbatch", "gpt-1.3b", "ckpt", *TOKENIZER),
            python=sys.executable,
            folder=tmp_path,
            TRAIN_ITERS="100",
            BASH_ENV=str(tmp_path / "env"),
        ).stdout

    # The ranks' part of the stub: what training leaves behind.
    (tmp_path / "env").write_text(
        f'if [[ $0 == {tools}/srun && " $* " == *" rank "* ]]; then cat {tmp_path}/after >{saved}; fi\n'
    )
    assert "saved at iteration 40 of 100: requeued" in train("20", "40")
    assert "requeued" not in train("40", "40")
    assert "requeued" not in train("80", "100")


def test_plan_passes_its_flags_on(tmp_path: Path) -> None:
    done = call(
        "plan.sbatch", "gpt-1.3b-toy", "plan.txt", "--budget", "9GiB", python=sys.executable, folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.txt").is_file()


def test_sweep_submits_each_run_with_the_nodes_that_it_needs(tmp_path: Path) -> None:
    done = call("sweep.sh", "root", "--", *TOKENIZER, python=sys.executable, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in (tmp_path / "out").read_text().splitlines()]
    jobs = {line[line.index("--job-name") + 1].removeprefix("lynx-"): line for line in lines}
    assert {name: int(line[1]) for name, line in jobs.items()} == {
        name: -(-tp * pp // 8) for name, (tp, pp) in SIZES.items()
    }
    assert jobs["gpt-7b"][-7:] == [str(SCRIPTS / "train.sbatch"), "gpt-7b", "root/gpt-7b", *TOKENIZER]


@pytest.mark.parametrize("name", SIZES)
def test_every_run_has_flags(capsys: pytest.CaptureFixture[str], name: str) -> None:
    tp, pp = SIZES[name]
    assert main(["args", "--run", name, "--world-size", str(2 * tp * pp)]) == 0
    flags = shlex.split(capsys.readouterr().out)
    assert flags[flags.index("--tensor-model-parallel-size") + 1] == str(tp)
    assert flags[flags.index("--pipeline-model-parallel-size") + 1] == str(pp)
    assert "--bf16" in flags


def test_flags_read_back_as_the_same_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``lynx args`` writes, ``--from-args`` reads."""
    job = ["--model", "llama3-8b", "--tp", "2", "--pp", "2", "--sequence-parallel"]
    sizes = ["--seq-length", "1024", "--micro-batch-size", "1", "--global-batch-size", "16"]
    assert main(["args", *job, *sizes]) == 0
    written = capsys.readouterr().out
    (tmp_path / "flags").write_text(written)
    assert main(["args", "--from-args", str(tmp_path / "flags"), "--dp", "1", "--vocab-size", "128256"]) == 0
    assert capsys.readouterr().out == written
