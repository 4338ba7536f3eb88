"""The launch scripts under a real slurmctld and two slurmd: TP 2 x PP 2 over two nodes, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lynx.cli.run_files import Report, read_report
from megatron_lynx.cost import CostTable
from tests.support.slurm import ROOT, SCRIPTS, SlurmCluster, slurm_cluster

RUN = """
num-layers = 4
hidden-size = 64
num-attention-heads = 4
vocab-size = 256
attention = "unfused"
masked-softmax-fusion = false
transformer-impl = "local"
dtype-bytes = 4
device = "cpu"
tp = 2
pp = 2
seq-length = 64
micro-batch-size = 2
global-batch-size = 8
"""
TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
ITERATIONS = 24
URGENT = (
    *("sbatch", "--parsable", "--partition", "urgent", "--nodes", "2", "--exclusive"),
    *("--wrap", "hostname"),
)

Losses = dict[int, set[float]]


class Trial:
    """A folder with a run, a cluster, and what its jobs left."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self.folder, self.cluster = folder, cluster
        (folder / "tiny.toml").write_text(RUN)

    def environment(self, name: str) -> dict[str, str]:
        """What a user would export, and where the losses go with all digits."""
        return {
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "MEGATRON_LYNX_CPU": "1",
            "MEGATRON_LYNX_RECORD": str(self.folder / f"{name}.record"),
            "TRAIN_ITERS": str(ITERATIONS),
            "SAVE_INTERVAL": "6",
        }

    def submit(self, name: str, script: str, *words: str) -> str:
        """``sbatch``; returns the job."""
        nodes = () if script == "plan.sbatch" else ("--nodes", "2")
        log = str(self.folder / f"{name}.log")
        command = ("sbatch", "--parsable", *nodes, "--output", log, str(SCRIPTS / script), *words)
        return self.cluster.run(*command, **self.environment(name)).strip()

    def train(self, name: str) -> str:
        """``train.sbatch``; returns the job."""
        words = ("tiny.toml", name, *TOKENIZER, "--mock-data", "--eval-iters", "0")
        return self.submit(name, "train.sbatch", *words, "--lynx-plan", "plan.txt")

    def log(self, name: str) -> str:
        """What a job printed."""
        return (self.folder / f"{name}.log").read_text()

    def losses(self, name: str) -> Losses:
        """Every loss of every iteration, those that were computed again too."""
        path = self.folder / f"{name}.record" / "rank3.jsonl"
        found: Losses = {}
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):
                step = json.loads(line)
                found.setdefault(step["iteration"], set()).add(step["loss"])
        return found

    def report(self, run: str | None = None) -> Report:
        """What ``lynx report`` reads; the plan came from a file, so its costs do too."""
        costs = CostTable.from_json((self.folder / "costs.json").read_text(), "costs.json")
        return read_report(self.folder / "train" / "lynx", run=run, profile=costs)

    def past(self, name: str, iteration: int) -> None:
        """Wait until training has made an iteration."""
        self.cluster.wait(f"{name} makes iteration {iteration}", lambda: iteration in self.losses(name))


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """Profile, plan and an uninterrupted training run (by the sweep), one after the other."""
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(folder / "cluster") as cluster:
        trial = Trial(folder, cluster)
        job = trial.submit("profile", "profile.sbatch", "tiny.toml", "costs.json", *TOKENIZER)
        assert cluster.finish(job) == "COMPLETED", trial.log("profile")
        job = trial.submit("plan", "plan.sbatch", "tiny.toml", "plan.txt", "--profile", "costs.json")
        assert cluster.finish(job) == "COMPLETED", trial.log("plan")
        yield trial


def test_profile_and_plan_write_what_training_reads(trial: Trial) -> None:
    assert json.loads((trial.folder / "costs.json").read_text())["layer"]
    assert (trial.folder / "plan.txt").read_text()


def test_a_job_goes_on_with_equal_losses_whatever_ends_it(trial: Trial) -> None:
    cluster = trial.cluster
    command = ["bash", str(SCRIPTS / "sweep.sh"), "sweep", "tiny.toml", "--"]
    command += [*TOKENIZER, "--mock-data", "--eval-iters", "0", "--lynx-plan", "plan.txt"]
    environment = {**trial.environment("sweep"), "GPUS_PER_NODE": "2", "SBATCH_OUTPUT": "sweep.log"}
    swept = cluster.run(*command, **environment).split()[-1]
    assert cluster.finish(swept) == "COMPLETED", trial.log("sweep")
    alone = trial.losses("sweep")
    assert sorted(alone) == [*range(1, ITERATIONS + 1)]

    job = trial.train("train")
    # The signal before a time limit: every rank saves and ends, the job queues itself again.
    trial.past("train", 2)
    cluster.run("scancel", "--signal", "TERM", job)
    cluster.wait("requeued", lambda: "requeued" in trial.log("train"))
    stopped = max(trial.losses("train"))
    assert f"saved at iteration {stopped} of {ITERATIONS}" in trial.log("train")
    # Preemption: a more urgent job takes the nodes, SLURM ends this one and queues it again.
    trial.past("train", 8)
    urgent = cluster.run(*URGENT).strip()
    assert cluster.finish(urgent) == "COMPLETED"
    assert cluster.restarts(job) == 2
    # A rank dies in the middle of a step: the job fails, and is started again by hand.
    trial.past("train", 14)
    os.kill(rank_of(trial, "3"), signal.SIGKILL)
    assert cluster.finish(job) == "FAILED"
    assert trial.report().iterations[1] >= 13
    cluster.run("scontrol", "requeue", job)
    cluster.wait("requeued", lambda: cluster.state(job) != "FAILED")
    assert cluster.finish(job) == "COMPLETED", trial.log("train")

    assert {iteration: set(losses) for iteration, losses in trial.losses("train").items()} == alone
    report = trial.report()
    assert len(report.runs) == 4
    assert report.iterations[1] == ITERATIONS
    assert report.missing == report.ahead == ()
    firsts = [trial.report(run).iterations[0] for run in report.runs]
    assert firsts[:2] == [1, stopped + 1]


def rank_of(trial: Trial, rank: str) -> int:
    """The process of a rank of this trial's job."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            own = dict(pair.split("=", 1) for pair in path.read_text().split("\0") if "=" in pair)
        except (OSError, ValueError):
            continue
        record = str(trial.folder / "train.record")
        if own.get("MEGATRON_LYNX_RECORD") == record and own.get("RANK") == rank:
            return int(path.parent.name)
    raise ProcessLookupError(f"rank {rank} does not run")


def test_shellcheck_finds_nothing() -> None:
    paths = [*map(str, SCRIPTS.iterdir()), *map(str, SCRIPTS.parent.glob("*.sh")), str(ROOT / ".ci" / "run")]
    done = subprocess.run(
        ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", *paths],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
