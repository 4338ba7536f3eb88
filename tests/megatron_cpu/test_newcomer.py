"""A newcomer's path: a folder with nothing but the wheel, of an sdist; install, plan, train, report.

The environment takes torch, Megatron and all else from the one that runs the tests, through a path file.
Python does not read the path files of a folder named there, such as that of an editable install: of the
repository nothing is seen.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import megatron_lynx
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, MOCK, MODEL
from tests.support.launch import REPOSITORY

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md")
BUILD = """
import os, tarfile
from setuptools import build_meta
name = build_meta.build_sdist("..")
tarfile.open("../" + name).extractall("..", filter="data")
os.chdir("../" + name.removesuffix(".tar.gz"))
build_meta.build_wheel("..")
"""
TRAIN = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=1
python -m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_lynx.pretrain_gpt {flags} "$@"
"""


def built(folder: Path) -> tuple[Path, Path]:
    """The sdist of these sources, and the wheel that is built from it alone."""
    copy = folder / "copy"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(REPOSITORY / name, copy / name)
    for name in ("megatron_lynx", "patches", "configs", "docs", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, copy / name, symlinks=True, ignore=ignored)
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


class Newcomer:
    """A clean environment with the wheel installed, and an empty folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.sdist, self.wheel = built(folder)
        self.work, self._venv = folder / "work", folder / "venv"
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self._venv)], check=True)
        packages = next(self._venv.glob("lib/python*/site-packages"))
        (packages / "rest.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(self._venv / "bin" / "python")]
        install = ["install", "-qq", "--no-index", "--no-deps", "--ignore-installed", str(self.wheel)]
        subprocess.run([*pip, *install], check=True)

    def run(self, *words: str) -> str:
        """Run a command of the environment where the newcomer works; returns what it printed."""
        done = subprocess.run(
            [str(self._venv / "bin" / words[0]), *words[1:]],
            cwd=self.work,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
                "PATH": f"{self._venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "MEGATRON_LYNX_CPU": "1",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    return Newcomer(tmp_path_factory.mktemp("newcomer"))


def test_the_wheel_brings_no_megatron_and_no_torch(newcomer: Newcomer) -> None:
    """Who has a Megatron of their own keeps it: only an extra that is asked for could bring another."""
    with zipfile.ZipFile(newcomer.wheel) as wheel:
        names = wheel.namelist()
        metadata = next(name for name in names if name.endswith("METADATA"))
        headers = Parser().parsestr(wheel.read(metadata).decode())
    asked = [line for line in headers.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert sorted(re.split(r"[<>=!~ ;]", line)[0] for line in asked) == ["highspy", "numpy", "rich"]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"megatron_lynx"}


def test_install_plan_train_report(newcomer: Newcomer) -> None:
    where = newcomer.run("python", "-c", "import megatron_lynx; print(megatron_lynx.__file__)")
    assert not where.startswith(str(REPOSITORY))
    assert newcomer.run("lynx", "--version").startswith(f"lynx {megatron_lynx.__version__}")
    flags = [*MODEL, *CPU_FLAGS, *MOCK, "--num-workers", "0", "--tensor-model-parallel-size", "2"]
    (newcomer.work / "train.sh").write_text(TRAIN.format(flags=" ".join(flags)))

    small = ("--from-args", "train.sh", "--cluster", "toy", "--budget", "2.2MiB")
    assert "checkmate" in newcomer.run("lynx", "compare", *small)
    newcomer.run("lynx", "plan", *small, "--planner", "heu", "--output", "plan.txt")
    assert "heu" in (newcomer.work / "plan.txt").read_text().splitlines()[0]

    words = ["bash", "train.sh", "--recompute-method", "lynx", "--lynx-plan", "plan.txt"]
    newcomer.run("lynx", "doctor", "--", *words)
    launch = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"
    trained = newcomer.run("python", "-c", launch, *words, "--lynx-report", "report", "--log-interval", "1")
    assert "> lynx: planner heu:" in trained
    assert "iteration        4/       4" in trained

    assert "planned" in newcomer.run("lynx", "report", "report", "--cluster", "toy", "--html", "page.html")
    assert (newcomer.work / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")


def test_the_sdist_has_what_operators_read(newcomer: Newcomer) -> None:
    listed = subprocess.run(["tar", "-tzf", str(newcomer.sdist)], check=True, capture_output=True, text=True)
    inside = {name.partition("/")[2] for name in listed.stdout.split()}
    for name in ("scripts/slurm/train.sbatch", "docs/operating.md", "CHANGELOG.md", "patches/0.19/series"):
        assert name in inside, name
