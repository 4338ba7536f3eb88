"""SLURM for tests: stubs that show what a script would call, and a real cluster of two nodes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"

_SRUN = """#!/usr/bin/env bash
# Runs what is to run once; of what every rank is to run, writes the words.
case " $* " in
*" rank "*) printf '%s\\n' "$@" >"$STUB_OUT" ;;
*)
    while [[ $1 == -* ]]; do case $1 in --nodes | --ntasks) shift 2 ;; *) shift ;; esac; done
    exec "$@"
    ;;
esac
"""
_SBATCH = """#!/usr/bin/env bash
echo "$(printf '%q ' "$@")" >>"$STUB_OUT"
"""
_SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] && printf 'node1\\nnode2\\n'
exit 0
"""


def call(
    script: str, *words: str, python: str, folder: Path, nodes: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a launch script with stubs in SLURM's place; ``folder/out`` has what they were given."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", _SRUN), ("sbatch", _SBATCH), ("scontrol", _SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "out").unlink(missing_ok=True)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
    }
    own = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": python,
        "PYTHONPATH": str(ROOT),
        "STUB_OUT": str(folder / "out"),
    }
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *words],
        cwd=folder,
        env={**os.environ, **own, **slurm, **environment},
        capture_output=True,
        text=True,
    )


class SlurmCluster:
    """A running cluster (``trial_cluster.sh``), and SLURM's commands for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str, **environment: str) -> str:
        """A command's output."""
        done = subprocess.run(
            words,
            env={**self.environment, **environment},
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}{done.stdout}")
        return done.stdout

    def _field(self, job: str, name: str) -> str:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING."""
        return self._field(job, "JobState")

    def restarts(self, job: str) -> int:
        """How often a job was queued again."""
        return int(self._field(job, "Restarts"))

    def wait(self, what: str, done: Callable[[], bool], timeout_s: int = 300) -> None:
        """Wait until ``done()``.

        Raises:
            TimeoutError: it did not happen; the message has the logs of the jobs.
        """
        end = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > end:
                logs = "\n".join(path.read_text()[-3000:] for path in self.folder.parent.glob("*.log"))
                raise TimeoutError(f"{what}: not within {timeout_s} s\n{self.run('squeue')}\n{logs}")
            time.sleep(0.2)

    def finish(self, job: str, timeout_s: int = 300) -> str:
        """Wait for a job's end; returns its last state."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        self.wait(f"job {job} ends", lambda: self.state(job) not in running, timeout_s)
        return self.state(job)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster in ``folder`` until the block ends.

    Raises:
        RuntimeError: SLURM or root is missing; says what to install.
    """
    script = str(SCRIPTS / "trial_cluster.sh")
    up = subprocess.run(["bash", script, "up", str(folder)], capture_output=True, text=True)
    if up.returncode:
        raise RuntimeError(f"no SLURM cluster: {up.stderr}")
    try:
        yield SlurmCluster(folder)
    finally:
        subprocess.run(["bash", script, "down", str(folder)], check=True)
