"""Launch scripts: bash reads them with stand-ins; nothing is started, written or misread in silence."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.cli.launch import restrict
from megatron_lynx.cli.launch.capturing import capture
from megatron_lynx.cli.megatron_args import MegatronArgs, read_args, read_command
from megatron_lynx.errors import ConfigError
from tests.support.command import Captured, lynx

MODEL = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024"
BATCH = "--micro-batch-size 2 --global-batch-size 64 --vocab-size 32000 --bf16"
TRAIN = f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {MODEL} {BATCH}"

LANDLOCK = restrict.version() >= 1


def test_this_system_can_read_scripts() -> None:
    assert LANDLOCK or sys.platform != "linux", "scripts are read under Landlock; this kernel has none"


def script(folder: Path, text: str, name: str = "train.sh") -> str:
    file = folder / name
    file.write_bytes(text.encode("utf-8"))
    return str(file)


def read(folder: Path, text: str, **named: Any) -> MegatronArgs:
    return read_args(script(folder, text), **named)


CONSTRUCTS: dict[str, tuple[str, dict[str, Any]]] = {
    "an if and an elif: one branch alone runs": (
        "SIZE=b\nif [ $SIZE = a ]; then TP=1; L=24\nelif [ $SIZE = b ]; then TP=2; L=30\n"
        f"else TP=8; L=128; fi\n{TRAIN} --num-layers $L --tensor-model-parallel-size $TP\n",
        {"tp": 2, "num_layers": 30},
    ),
    "a case": (
        f"case ${{S:-b}} in a) T=1;; b) T=4;; *) T=8;; esac\n{TRAIN} --tensor-model-parallel-size $T\n",
        {"tp": 4},
    ),
    "a for": (
        "A=()\nfor flag in --swiglu --disable-bias-linear; do A+=($flag); done\n" + TRAIN + ' "${A[@]}"\n',
        {"swiglu": True, "add_bias_linear": False},
    ),
    "[ ... ] && ARGS+=": (
        f'ARGS=""\n[ 1 = 1 ] && ARGS+=" --swiglu"\n[ 1 = 2 ] && ARGS+=" --num-layers 99"\n{TRAIN} $ARGS\n',
        {"swiglu": True, "num_layers": 24},
    ),
    "a commented line that ends in a backslash": (
        f"TP=2\n# {TRAIN} --num-layers 99 \\\n{TRAIN} --tensor-model-parallel-size $TP\n",
        {"num_layers": 24, "tp": 2},
    ),
    "nested defaults": (f"{TRAIN} --tensor-model-parallel-size ${{NOT_SET:-${{NOR_THIS:-8}}}}\n", {"tp": 8}),
    "sums": (f"N=4\n{TRAIN} --global-batch-size $((N * (3 + 5)))\n", {"global_batch_size": 32}),
    "a second command after training": (
        f"{TRAIN}\npython tools/convert.py --target-tensor-parallel-size 1 --num-layers 3\n",
        {"num_layers": 24},
    ),
    "a command in a string, by eval": (
        f'options=" \\\n --swiglu "\ncmd="{TRAIN} ${{options}}"\necho $cmd\neval $cmd\n',
        {"swiglu": True},
    ),
    "srun of a string, tasks from #SBATCH": (
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8  # a GPU each\nset -e\n"
        f'CMD="python -u /code/pretrain_gpt.py {MODEL} {BATCH}"\nsrun -l --output=log sh -c "${{CMD}}"\n',
        {"world_size": 32},
    ),
    "torchrun on each node of #SBATCH": (
        "#SBATCH --nodes 3\n#SBATCH --ntasks-per-node 1\n#SBATCH --gpus-per-node 8\n"
        "A=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\n"
        "srun bash -c \"torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_PER_NODE "
        f'--rdzv-endpoint $A:29500 pretrain_gpt.py {MODEL} {BATCH}"\n',
        {"world_size": 24},
    ),
    "python -m torch.distributed.launch": (
        f"python3 -m torch.distributed.launch --nproc_per_node=4 p.py {MODEL} {BATCH}\n",
        {"world_size": 4},
    ),
    "a launcher by its path, after PATH has changed": (
        f"export PATH=/usr/bin:$PATH\n/opt/conda/bin/{TRAIN}\n",
        {"world_size": 16},
    ),
    "output to a file, in the background, in a pipe": (
        f"mkdir -p /tmp/lynx-no/such\n{TRAIN} > /lynx-none/log 2>&1 &\nwait\n",
        {"world_size": 16},
    ),
    "what is missing here": (
        f"set -e\nsource /none/env.sh\ncd /none/code\nmodule load cuda\n{TRAIN} | tee log.txt\n",
        {"world_size": 16},
    ),
    "a heredoc": (
        "set -u\ncat > /none/config.json <<EOT\n{ \"a\": 1 } --num-layers 99 > b\nEOT\n" + TRAIN + "\n",
        {"num_layers": 24},
    ),
    "sbatch of a heredoc": (
        "sbatch --nodes=2 <<EOF\n#!/bin/bash\n#SBATCH --ntasks-per-node=8\n"
        f"srun python pretrain_gpt.py {MODEL} {BATCH}\nEOF\n",
        {"world_size": 16},
    ),
    "sbatch --wrap": (
        f"sbatch -N 2 --ntasks-per-node=4 --wrap='srun python p.py {MODEL} {BATCH}'\n",
        {"world_size": 8},
    ),
    "uv run": (f"uv run --no-sync {TRAIN}\n", {"world_size": 16}),
    "mpirun": (f"mpirun -np 8 -x PATH python pretrain_gpt.py {MODEL} {BATCH}\n", {"world_size": 8}),
    "docker": (f"docker run --gpus all -v /a:/b image:tag bash -c '{TRAIN}'\n", {"world_size": 16}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_bash_reads_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    text, expected = CONSTRUCTS[name]
    found = read(tmp_path, f"#!/bin/bash\n{text}")
    known = {**found.values, "world_size": found.world_size}
    assert {key: known[key] for key in expected} == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.sh"]


def test_files_that_a_script_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "TP=4\nPP=<your pipeline size>\n", "config.sh")
    script(tmp_path, "--swiglu --disable-bias-linear\n", "more.txt")
    script(tmp_path, f"{TRAIN} --tensor-model-parallel-size $TP $(cat more.txt) $1 --save $PP\n", "inner.sh")
    found = read(tmp_path, "source config.sh\nexport TP PP\n./inner.sh --normalization=RMSNorm\n")
    assert (found.values["tp"], found.values["swiglu"]) == (4, True)
    assert found.values["normalization"] == "RMSNorm"
    assert any("placeholders in config.sh" in note for note in found.notes)


def test_arguments_of_the_script(tmp_path: Path) -> None:
    file = script(tmp_path, f"[ $1 = 7B ] && L=32\n{TRAIN} --num-layers $L --save ${{2}}\n")
    assert read_command(["bash", file, "7B", "out"]).values["num_layers"] == 32
    with pytest.raises(ConfigError, match=r"--num-layers has no value \(unset in the script: 1"):
        read_command(["bash", file])


def test_an_unset_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{TRAIN} --num-layers $LAYERS --lr 1\n"
    with pytest.raises(ConfigError, match=r"--num-layers has no value \(unset in the script: LAYERS\)"):
        read(tmp_path, text)
    monkeypatch.setenv("LAYERS", "6")
    assert read(tmp_path, text).values["num_layers"] == 6


def test_nothing_is_started_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole", "utf-8")
    text = (
        f"rm -rf {victim}\n/bin/rm -f {victim}\n(echo x) > {victim}\necho y >> {victim}\n"
        f"{{ echo z; }} > {tmp_path}/new\n: > {victim}\nmkdir {tmp_path}/folder\n"
        f'python -c \'open("{tmp_path}/py", "w")\'\nfind {tmp_path} -name victim -delete\n'
        f"sed -i s/w/v/ {victim}\nexec 3> {victim}\nkill -9 {os.getpid()}\n{TRAIN}\n"
    )
    found = read(tmp_path, text)
    assert found.world_size == 16
    assert victim.read_text("utf-8") == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.sh", "victim"]
    passed = next(note for note in found.notes if "passed over" in note)
    assert "rm" in passed
    assert "python" in passed


REFUSED: dict[str, tuple[str, str]] = {
    "what a program says": (
        f"N=$(nvidia-smi -L | wc -l)\nL=$(my-tool layers)\n{TRAIN} --num-layers $L\n",
        "--num-layers comes from a program that was not run",
    ),
    "nothing that trains": ("echo hello\n", "started nothing .*its last words: hello"),
    "a script that gives up": ("echo no data found\nexit 3\n", "ended with code 3; its last words: no data"),
    "only a conversion": ("python convert.py --num-layers 3\n", "nothing|no flag"),
    "bad shell": (f"if true; then\n{TRAIN}\n", "syntax error"),
    "Windows line ends": (f"TP=2\r\n{TRAIN}\r\n", "Windows line ends"),
    "two trainings": (f"for l in 2 4; do {TRAIN} --num-layers $l; done\n", "starts 2 different trainings"),
    "two words in one": (f'A=("--lr 3")\n{TRAIN} "${{A[@]}}"\n', "'--lr 3' is one word"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_one_of_several_trainings(tmp_path: Path) -> None:
    text = f"for l in 2 4; do {TRAIN} --num-layers $l; done\n"
    assert read(tmp_path, text, number=2).values["num_layers"] == 4
    with pytest.raises(ConfigError, match=r"--launch 3: .* starts 2 trainings"):
        read(tmp_path, text, number=3)


def test_node_ranks_are_one_training(tmp_path: Path) -> None:
    text = f"for r in 0 1; do {TRAIN.replace('--nnodes 2', '--nnodes 2 --node_rank $r')} & done; wait\n"
    assert read(tmp_path, text).world_size == 16


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        ("torchrun --nproc_per_node $GPUS --nnodes 2", "--nproc-per-node has no value .*GPUS"),
        ("torchrun --nproc-per-node auto", "--nproc-per-node is 'auto'"),
        ("torchrun --nproc-per-node 8 --nnodes $SLURM_NNODES", "--nnodes has no value .*SLURM_NNODES"),
        ("python", "no launcher says"),
        ("srun python", "srun's --nodes"),
        ("deepspeed", "--num_gpus is not given"),
    ],
)
def test_an_unknown_number_of_ranks_is_refused(
    capsys: Captured, tmp_path: Path, launcher: str, reason: str
) -> None:
    file = script(tmp_path, f"{launcher} pretrain_gpt.py {MODEL} {BATCH}\n")
    assert read_args(file).world_size is None
    code, _, err = lynx(capsys, "plan", "--from-args", file)
    assert code == 2
    assert "--world-size is not given" in err
    assert re.search(reason, err), err
    code, _, err = lynx(
        capsys, "plan", "--from-args", file, "--world-size", "8", "--planner", "none", "--json"
    )
    assert code == 0, err


def test_a_command_line_is_planned_as_it_stands(capsys: Captured) -> None:
    flags = f"{MODEL} {BATCH} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2".split()
    words = ["torchrun", "--nproc-per-node", "8", "-m", "megatron_lynx.pretrain_gpt", *flags]
    code, out, err = lynx(capsys, "plan", "--planner", "none", "--json", "--", *words)
    assert code == 0, err
    data = json.loads(out)
    assert [data["parallel"][name] for name in ("tp", "pp", "dp")] == [4, 2, 1]
    wrapped = ["env", "A=1", "srun", "-N", "2", "--ntasks-per-node", "8", "python", "p.py", *flags]
    assert read_command(wrapped).world_size == 16


def test_sequence_parallelism_is_cleared_without_tensor_parallelism(capsys: Captured, tmp_path: Path) -> None:
    file = script(tmp_path, f"{TRAIN} --sequence-parallel --global-batch-size 64\n")
    code, out, err = lynx(capsys, "plan", "--from-args", file, "--planner", "none", "--json")
    assert code == 0, err
    assert json.loads(out)["parallel"]["sequence_parallel"] is False
    assert "--sequence-parallel is cleared, as Megatron does" in err


def test_a_script_of_another_model_is_no_gpt(tmp_path: Path) -> None:
    text = TRAIN.replace("pretrain_gpt.py", "tools/pretrain_bert.py")
    with pytest.raises(ConfigError, match=r"pretrain_bert\.py: trains another kind of model"):
        read(tmp_path, text).check()
    assert read(tmp_path, text, ignore=["pretrain_bert.py"]).refused == ()


# The command `lynx capture`


def test_capture_writes_what_from_args_reads(capsys: Captured, tmp_path: Path) -> None:
    odd = f"{TRAIN} --save $'a\\nb \\xff' --wandb-exp-name 'x \"y\"'\n"
    file, lines = (
        script(tmp_path, f"touch {tmp_path}/ran\n{odd}python convert.py --num-layers 2\n"),
        tmp_path / "l",
    )
    code, out, err = lynx(capsys, "capture", "--output", str(lines), "--", "bash", file)
    assert (code, out) == (0, "")
    assert "the rest of the script does run" in err
    assert (tmp_path / "ran").exists()
    assert "ranks 16" in err
    argv = json.loads(lines.read_text("utf-8").splitlines()[0])["argv"]
    assert "a\nb \udcff" in argv
    assert 'x "y"' in argv
    assert read_args(str(lines)).world_size == 16


def test_a_dry_capture_refuses_side_effects(capsys: Captured, tmp_path: Path) -> None:
    file = script(tmp_path, f"mkdir -p {tmp_path}/a\necho b > {tmp_path}/b\n{TRAIN}\n")
    code, _, err = lynx(capsys, "capture", "--dry", "--", "bash", file)
    assert code == 2
    assert "--dry: the script has side effects: mkdir, writing echo b >" in err
    code, out, err = lynx(capsys, "capture", "--dry", "--", "bash", script(tmp_path, f"{TRAIN}\n"))
    assert code == 0, err
    assert len(out.splitlines()) == 1


def test_a_free_capture_starts_no_launcher_by_any_way(tmp_path: Path) -> None:
    own = tmp_path / "bin"
    own.mkdir()
    for name in ("torchrun", "srun"):
        (own / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n", "utf-8")
        (own / name).chmod(0o755)
    text = (
        f"set -eu\nPATH={own}:$PATH\n{TRAIN}\nf() {{ {own}/{TRAIN}; }}\nf\nX=$({TRAIN})\n"
        f"( cd /; {TRAIN} )\nexec srun -n 4 python pretrain_gpt.py {MODEL}\n"
    )
    found = capture(["bash", script(tmp_path, text)], restricted=False)
    assert len(found.launches) == 5
    assert not (tmp_path / "started").exists()
