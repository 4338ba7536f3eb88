"""The job that ``lynx bench`` trains, and what it asks the ranks to measure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_lynx.cli.explain import read_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """One parallel setting: its sizes, its batch, Megatron's methods in it, and lynx's budgets.

    Budgets are shares of the peak without recomputation, or with a plus above full recomputation's.
    A case that is not for ``every_link`` runs over the first one only. There is no ``dropout`` but where
    it is asked for: a CPU draws a mask about as slowly as it runs a GEMM, a GPU hardly notices.
    """

    tp: int
    pp: int
    micro_batch_size: int
    microbatches: int
    stock: tuple[str, ...]
    budgets: str = "10%+,45%,60%,80%"
    every_link: bool = True
    dropout: float = 0.0


_TP2 = BenchJob(
    tp=2,
    pp=1,
    micro_batch_size=64,
    microbatches=1,
    stock=("full", "block", "selective", "mlp", "core_attn+mlp"),
)
CASES = {
    "tp2": _TP2,
    "tp2-dropout": replace(_TP2, every_link=False, dropout=0.1),
    "pp2": BenchJob(
        tp=1,
        pp=2,
        micro_batch_size=32,
        microbatches=4,
        stock=("full", "block", "selective"),
        every_link=False,
    ),
}
"""Tensor parallelism shows the windows of collectives, pipeline parallelism the stalls."""

SHAPE = {"num_layers": 8, "hidden_size": 128, "seq_length": 64}
"""Sequence over hidden size is GPT-7B's, 2048 to 4096, so that attention is as large a part of a layer.
The hidden size makes collectives as large a part of it, at 400 Mbit/s, as on GPUs joined by PCIe, and at
1 Gbit/s a smaller one: the page states both (`bench_report`)."""
TINY = {"num_layers": 4, "hidden_size": 64, "seq_length": 64, "micro_batch_size": 2}
HEAD = 64
"""Width of an attention head; a tiny model's is 16."""


def megatron_arguments(args: argparse.Namespace, name: str, cache: Path) -> list[str]:
    """Megatron's command line for a case."""
    case = CASES[name]
    shape = {**SHAPE, "micro_batch_size": case.micro_batch_size, **(TINY if args.tiny else {})}
    shape |= {key: value for key in shape if (value := getattr(args, key)) is not None}
    values = {
        "num-layers": shape["num_layers"],
        "hidden-size": shape["hidden_size"],
        "num-attention-heads": shape["hidden_size"] // (16 if args.tiny else HEAD),
        "seq-length": shape["seq_length"],
        "max-position-embeddings": shape["seq_length"],
        "tensor-model-parallel-size": case.tp,
        "pipeline-model-parallel-size": case.pp,
        "micro-batch-size": shape["micro_batch_size"],
        "global-batch-size": shape["micro_batch_size"] * case.microbatches,
        "attention-dropout": case.dropout,
        "hidden-dropout": case.dropout,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": 1023,
        "data-cache-path": cache,
        "split": "100,0,0",
        "train-iters": 5000,
        "lr": 1e-4,
        "lr-decay-style": "constant",
        "eval-iters": 0,
        "num-workers": 0,
        "transformer-impl": "local",
        "distributed-backend": "gloo",
    }
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    return [*words, "--mock-data", *SWITCHES]


SWITCHES = ("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion")
"""What works from Megatron's wheel alone, without Transformer Engine and Apex."""


def request(args: argparse.Namespace, name: str, arguments: list[str], seconds: float) -> dict[str, Any]:
    """What the ranks read."""
    case, overhead = CASES[name], getattr(args, "overhead", False)
    return {
        "arguments": arguments,
        "stock": ["full"] if overhead else list(case.stock),
        "block": [2] if args.tiny else None,
        "budgets": [] if overhead else (args.budgets or case.budgets).split(","),
        "planners": {"lynx keeps everything": "none", "lynx drops everything": "tail-free"}
        if overhead
        else {},
        "plans": {
            Path(file).stem: str(read_plan(file, "--plans")) for file in (args.plans or "").split(",") if file
        },
        "planner": args.planner,
        "rounds": args.rounds,
        "seconds": seconds,
    }
