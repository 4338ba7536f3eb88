"""``lynx args``: the Megatron flags of a job, for launch scripts.

torchrun ... -m megatron_lynx.pretrain_gpt $(lynx args --model gpt-7b --tp 4 --pp 4 ...) ...
"""

from __future__ import annotations

import argparse
import shlex
import sys

from megatron_lynx.cli.job import add_job_flags, choices_from
from megatron_lynx.search.workflow import Job


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_job_flags(parser, plans=False)


def run(args: argparse.Namespace) -> int:
    """Print the flags on one line, quoted for a shell."""
    job = choices_from(args, check_split=False).job
    sys.stdout.write(shlex.join(megatron_flags(job)) + "\n")
    return 0


def megatron_flags(job: Job) -> list[str]:
    """Megatron's flags that describe ``job``: shape, parallel sizes, batch, precision."""
    model, parallel, batch = job.model, job.parallel, job.batch
    values: dict[str, int | float | str | None] = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn,
        "num-attention-heads": model.num_attention_heads,
        "kv-channels": model.kv_channels,
        "seq-length": batch.seq_length,
        "max-position-embeddings": max(batch.seq_length, model.max_position_embeddings or 0),
        "position-embedding-type": model.position_embedding_type,
        "normalization": model.normalization,
        "attention-dropout": model.attention_dropout,
        "hidden-dropout": model.hidden_dropout,
        "tensor-model-parallel-size": parallel.tp,
        "pipeline-model-parallel-size": parallel.pp,
        "micro-batch-size": batch.micro_batch_size,
        "global-batch-size": batch.global_batch_size,
        "pipeline-model-parallel-layout": job.layout,
        "transformer-impl": model.transformer_impl,
        "mtp-num-layers": model.mtp_num_layers or None,
    }
    if parallel.vpp > 1 and job.layout is None:
        values["num-virtual-stages-per-pipeline-rank"] = parallel.vpp
    flags = [
        word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))
    ]
    if model.groups != model.num_attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(model.groups)]
    switches = {
        "swiglu": model.swiglu,
        "disable-bias-linear": not model.add_bias_linear,
        "untie-embeddings-and-output-weights": model.untie_embeddings_and_output_weights,
        "sequence-parallel": parallel.sequence_parallel,
        "use-distributed-optimizer": job.optimizer.use_distributed_optimizer,
        "bf16": model.dtype_bytes == 2,
        "attention-softmax-in-fp32": model.attention_softmax_in_fp32,
        "no-masked-softmax-fusion": not model.masked_softmax_fusion,
        "no-create-attention-mask-in-dataloader": not model.mask_from_data,
        "no-bias-swiglu-fusion" if model.swiglu else "no-bias-gelu-fusion": not model.fused_activation,
    }
    return flags + [f"--{name}" for name, on in switches.items() if on]
