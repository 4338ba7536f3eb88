"""What ``lynx tune`` prints for its first entries passes Megatron's own validation of arguments."""

from __future__ import annotations

import sys

import pytest
from megatron.training import arguments

from megatron_lynx.cli.tune import launch_of
from megatron_lynx.hardware import Cluster
from megatron_lynx.integration.arguments import with_lynx_arguments
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.found import WITH, WITHOUT, Found
from megatron_lynx.search.space import Question
from megatron_lynx.search.tune import Limits, tune

PROBLEMS = {
    "gpt-1.3b": Question(
        model=load_model("gpt-1.3b"),
        cluster=load_cluster("a100-40g-pcie"),
        devices=8,
        seq_length=2048,
        global_batch_size=64,
        fixed={"dp": 2},
    ),
    "llama-7b": Question(
        model=load_model("llama-7b"),
        cluster=load_cluster("a100-40g-nvlink"),
        devices=8,
        seq_length=2048,
        global_batch_size=32,
        fixed={"dp": 1},
        memory_bytes=30 << 30,
    ),
    "gpt-7b": Question(
        model=load_model("gpt-7b"),
        cluster=load_cluster("h100-nvlink"),
        devices=16,
        seq_length=2048,
        global_batch_size=64,
        fixed={"tp": 2},
    ),
}
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50000", "--train-iters", "1")
OWN = ("--lr", "1e-4", "--transformer-impl", "local", "--no-persist-layer-norm")


def check_entry(monkeypatch: pytest.MonkeyPatch, question: Question, entry: Found, cluster: Cluster) -> None:
    words = list(launch_of(question, entry).words)
    flags = words[words.index("megatron_lynx.pretrain_gpt") + 1 :]
    lynx = "--lynx-plan" in flags
    if lynx:
        at = flags.index("--recompute-method")
        flags = flags[:at] + flags[at + 4 :]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags, *DATA, *OWN])
    monkeypatch.setenv("WORLD_SIZE", str(question.devices))
    args = arguments.parse_args(with_lynx_arguments(None))
    assert args.world_size == question.devices
    arguments.validate_args(args)
    assert args.data_parallel_size == entry.config.dp
    assert (args.virtual_pipeline_model_parallel_size or 1) == entry.config.vpp
    assert args.use_distributed_optimizer == entry.config.distributed_optimizer
    assert args.sequence_parallel == entry.config.sequence_parallel


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_the_first_entries_pass_megatrons_validation(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    question = PROBLEMS[name]
    tuned = tune(question, limits=Limits(top=10, quick=True, time_limit_s=600))
    for side in (WITH, WITHOUT):
        entries = tuned.found[side][:10]
        assert len(entries) == 10
        for entry in entries:
            check_entry(monkeypatch, question, entry, question.cluster)
