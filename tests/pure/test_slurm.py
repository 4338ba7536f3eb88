"""The launch scripts are valid shell, and the flags that they ask for exist for every model."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_lynx.cli.main import main

SLURM = Path(__file__).resolve().parents[2] / "scripts" / "slurm"
JOBS = re.findall(r"^(gpt-\S+) (\d+) (\d+)$", (SLURM / "sweep.sh").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(SLURM.iterdir()), ids=lambda path: path.name)
def test_scripts_parse_and_say_what_they_need(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    called = subprocess.run(["bash", str(path)], capture_output=True, text=True)
    assert called.returncode == 2
    assert "needs" in called.stderr


def test_the_sweep_goes_from_1_3b_to_23b() -> None:
    assert [job[0].removeprefix("gpt-") for job in JOBS] == [
        "1.3b",
        "2.7b",
        "4.7b",
        "7b",
        "13b",
        "20b",
        "23b",
    ]


@pytest.mark.parametrize(("model", "tp", "pp"), JOBS)
def test_every_job_has_flags(capsys: pytest.CaptureFixture[str], model: str, tp: str, pp: str) -> None:
    sizes = ["--seq-length", "2048", "--micro-batch-size", "4", "--global-batch-size", "512"]
    assert main(["args", "--model", model, "--tp", tp, "--pp", pp, *sizes, "--attention", "unfused"]) == 0
    flags = shlex.split(capsys.readouterr().out)
    assert flags[flags.index("--tensor-model-parallel-size") + 1] == tp
    assert flags[flags.index("--pipeline-model-parallel-size") + 1] == pp
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
