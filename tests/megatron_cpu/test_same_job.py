"""The same flags are the same job to the planning commands and to the run that trains."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from megatron_lynx.cli.job import add_job_flags, choices_from
from megatron_lynx.spec import job_facts
from tests.megatron_cpu.test_pretrain_entry import CPU_FLAGS, LLAMA, MODEL
from tests.support.launch import run_ranks

MOCK = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
BASE = (*MODEL, "--num-layers", "4", *CPU_FLAGS, *MOCK)
ROWS = {
    "plain": (),
    "llama": LLAMA,
    "llama bf16": (*LLAMA, "--bf16"),
    "tensor parallel": ("--tensor-model-parallel-size", "2"),
    "sequence parallel": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
    "interleaved": (
        *("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
        *("--global-batch-size", "8"),
    ),
    "virtual stages": (
        *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
        *("--global-batch-size", "12", "--microbatch-group-size-per-virtual-pipeline-stage", "3"),
    ),
    "layout": ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Ettt|tL"),
    "virtual layout": (
        *("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et|t|t|tL"),
        *("--global-batch-size", "8"),
    ),
    "defaults said": ("--kv-channels", "16", "--ffn-hidden-size", "256", "--attention-dropout", "0.1"),
    "other dropout": ("--hidden-dropout", "0.2", "--attention-dropout", "0"),
    "no bias": ("--disable-bias-linear",),
    "no bias, no fusion": ("--disable-bias-linear", "--no-bias-gelu-fusion"),
    "swiglu": ("--swiglu",),
    "swiglu, no fusion": ("--swiglu", "--no-bias-swiglu-fusion"),
    "wide": ("--swiglu", "--disable-bias-linear", "--ffn-hidden-size", "192", "--kv-channels", "32"),
    "own mask": ("--no-create-attention-mask-in-dataloader",),
    "softmax in fp32": ("--bf16", "--attention-softmax-in-fp32"),
    "scaling": ("--fp16", "--apply-query-key-layer-scaling"),
    "rope": ("--position-embedding-type", "rope", "--no-rope-fusion"),
    "groups": ("--group-query-attention", "--num-query-groups", "1"),
    "norm": ("--normalization", "RMSNorm"),
    "padded": ("--make-vocab-size-divisible-by", "96"),
    "untied": ("--untie-embeddings-and-output-weights",),
    "first": (
        *("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"),
        *("--global-batch-size", "8"),
    ),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict[str, object]]]:
    """Each row's facts by Megatron, on as many ranks as it needs at least."""
    return {
        name: facts
        for name, *facts in zip(
            ROWS,
            *run_ranks(
                2, "tests.megatron_cpu.fault_ranks:facts", [[*BASE, *row] for row in ROWS.values()], 120
            ),
            strict=True,
        )
    }


@pytest.mark.parametrize("name", ROWS)
def test_both_resolve_the_same_job(
    trained: dict[str, list[dict[str, object]]], name: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "torchrun --nproc-per-node 2 pretrain_gpt.py " + shlex.join([*BASE, *ROWS[name]]) + "\n"
    )
    parser = argparse.ArgumentParser()
    add_job_flags(parser)
    job = choices_from(parser.parse_args(["--from-args", str(script)])).job
    planned = dict(job_facts(job.model, job.parallel, job.batch))
    assert all(facts == planned for facts in trained[name]), name
