"""What ``lynx tune`` prints for its first entries passes Megatron's own validation of arguments."""

from __future__ import annotations

import sys

import pytest
from megatron.training import arguments

from megatron_lynx.cli.tune import launch_of
from megatron_lynx.integration.arguments import with_lynx_arguments
from megatron_lynx.integration.cpu.backend import cpu_backend
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.found import WITH, WITHOUT, Found
from megatron_lynx.search.space import Question
from megatron_lynx.search.tune import Limits, tune


def ask(model: str, cluster: str, devices: int, gib: int, **fixed: int) -> Question:
    """A question with few layers and few sizes that are free, so that it is answered fast."""
    return Question(
        model=load_model(model, num_layers=8),
        cluster=load_cluster(cluster),
        devices=devices,
        seq_length=2048,
        global_batch_size=16,
        memory_bytes=gib << 30,
        fixed=fixed,
    )


PROBLEMS = {
    "gpt-1.3b": ask("gpt-1.3b", "a100-40g-pcie", 8, 5, tp=2, micro_batch_size=4),
    "llama-7b": ask("llama-7b", "a100-40g-nvlink", 8, 8, dp=1, pp=4),
    "gpt-7b": ask("gpt-7b", "a100-40g-nvlink", 16, 7, tp=4, micro_batch_size=2),
}
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50000", "--train-iters", "1")
OWN = ("--lr", "1e-4")
LIMITS = Limits(top=10, time_limit_s=600)


def check_entry(monkeypatch: pytest.MonkeyPatch, question: Question, entry: Found) -> None:
    """Megatron takes the printed flags, and understands what the entry says."""
    words = list(launch_of(question, entry).words)
    flags = words[words.index("megatron_lynx.pretrain_gpt") + 1 :]
    if "--lynx-plan" in flags:  # lynx's own, which its entry point reads; Megatron never sees the method
        at = flags.index("--recompute-method")
        flags = flags[:at] + flags[at + 4 :]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags, *DATA, *OWN])
    monkeypatch.setenv("WORLD_SIZE", str(question.devices))
    args = arguments.parse_args(with_lynx_arguments(None))
    assert args.world_size == question.devices
    with cpu_backend():
        arguments.validate_args(args)
    config = entry.config
    assert args.data_parallel_size == config.dp
    assert args.micro_batch_size == config.micro_batch_size
    assert args.transformer_impl == question.model.transformer_impl
    assert (args.virtual_pipeline_model_parallel_size or 1) == config.vpp
    assert args.use_distributed_optimizer == config.distributed_optimizer
    assert args.sequence_parallel == config.sequence_parallel


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_the_first_entries_pass_megatrons_validation(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    question = PROBLEMS[name]
    tuned = tune(question, limits=LIMITS)
    for side in (WITH, WITHOUT):
        entries = tuned.found[side][:10]
        assert len(entries) == 10
        for entry in entries:
            check_entry(monkeypatch, question, entry)
