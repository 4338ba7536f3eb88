"""What the launch scripts give to every rank is known to Megatron's parser, for each model of the sweep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from megatron.training import arguments

from megatron_lynx.integration.arguments import with_lynx_arguments
from tests.support.slurm import call

TOKENIZER = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v.json", "--merge-file", "m.txt")


@pytest.mark.parametrize("size", ["1.3b", "2.7b", "4.7b", "7b", "13b", "20b", "23b"])
@pytest.mark.parametrize("script", ["train.sbatch", "profile.sbatch"])
def test_every_flag_parses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, size: str) -> None:
    done = call(
        *(script, f"gpt-{size}", "out", *TOKENIZER, "--data-path", "data/text"),
        python=sys.executable,
        folder=tmp_path,
        nodes=8 if size != "23b" else 10,
    )
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "out").read_text().splitlines()
    flags = words[words.index("--num-layers") :]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags])
    args = arguments.parse_args(with_lynx_arguments(None))
    sizes = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    assert (80 if size == "23b" else 64) % sizes == 0
    assert args.bf16
    assert args.vocab_file == "v.json"
