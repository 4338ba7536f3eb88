"""The job that Megatron's arguments describe, in megatron_lynx's own nouns."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

import torch

from megatron_lynx.integration.cpu.backend import cpu_backend_active
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel


def model_of(args: Namespace, config: Any, device: torch.device) -> Model:
    """The model's shape.

    ``config`` is Megatron's TransformerConfig, which has resolved what depends on other flags;
    ``device`` is where the weights are.
    """
    kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
    return _model(
        args,
        config,
        vocab_size=args.padded_vocab_size,
        num_query_groups=config.num_query_groups,
        swiglu=config.gated_linear_unit,
        attention_softmax_in_fp32=config.attention_softmax_in_fp32,
        mask_from_data=args.create_attention_mask_in_dataloader,
        fused_activation=config.bias_activation_fusion,
        masked_softmax_fusion=config.masked_softmax_fusion,
        cross_entropy_loss_fusion=config.cross_entropy_loss_fusion,
        cross_entropy_fusion_impl=getattr(config, "cross_entropy_fusion_impl", "native"),
        dtype_bytes=torch.finfo(config.params_dtype).bits // 8,
        device=kind,
    )


def device_of(chunks: Sequence[Any]) -> torch.device:
    """Where the model is. A rank may hold no weight: an empty stage."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            return torch.device(parameter.device)
    return torch.device("cpu") if cpu_backend_active() else torch.device("cuda", torch.cuda.current_device())


def parallel_of(args: Namespace) -> Parallel:
    """The parallel sizes."""
    return Parallel(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
        dp=args.data_parallel_size,
        sequence_parallel=args.sequence_parallel,
        microbatch_group_size=args.microbatch_group_size_per_vp_stage
        if args.virtual_pipeline_model_parallel_size
        else None,
    )


def batch_of(args: Namespace) -> Batch:
    """The sequence length and batch sizes."""
    return Batch(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
    )


def optimizer_of(args: Namespace) -> Optimizer:
    """How gradients and optimizer state are kept; what an older Megatron has no flag for is as there."""
    own = {field.name: getattr(args, field.name) for field in fields(Optimizer) if hasattr(args, field.name)}
    if args.bf16 and not getattr(args, "grad_reduce_in_bf16", False):
        plain = getattr(args, "main_grads_dtype", "fp32") in ("fp32", torch.float32)
        own["accumulate_allreduce_grads_in_fp32"] |= plain  # as validate_args does, which may be to come
    types = {name: str(value).rpartition(".")[2] for name, value in own.items() if name.endswith("_dtype")}
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "fp8"}
    return Optimizer(**{**own, **{name: names.get(text, text) for name, text in types.items()}})


def model_before_validation(args: Namespace) -> Model:
    """The model's shape as far as parsed arguments tell, before Megatron has validated them.

    Good enough to split layers over stages: the vocabulary is not padded yet, and Megatron's
    defaults are taken from ``spec``.
    """
    return _model(
        args,
        args,
        vocab_size=getattr(args, "padded_vocab_size", None) or args.vocab_size or 51200,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        swiglu=args.swiglu,
        dtype_bytes=2 if args.bf16 or args.fp16 else 4,
    )


def _model(args: Namespace, shape: Any, **fields: Any) -> Model:
    """A model of ``fields`` and of what arguments and config have under the same names; ``shape`` is
    whichever of the two knows best."""
    return Model(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization=shape.normalization,
        add_bias_linear=shape.add_bias_linear,
        attention_dropout=shape.attention_dropout,
        hidden_dropout=shape.hidden_dropout,
        position_embedding_type="rope" if args.position_embedding_type == "rope" else "learned_absolute",
        max_position_embeddings=args.max_position_embeddings,
        untie_embeddings_and_output_weights=args.untie_embeddings_and_output_weights,
        attention="unfused",
        **fields,
    )
