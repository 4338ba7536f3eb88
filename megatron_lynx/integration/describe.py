"""The job that Megatron's arguments describe, in megatron_lynx's own nouns."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Literal

import torch

from megatron_lynx.spec import Batch, Model, Parallel


def model_of(args: Namespace, config: Any, device: torch.device) -> Model:
    """The model's shape.

    ``config`` is Megatron's TransformerConfig, which has resolved what depends on other flags;
    ``device`` is where the weights are.
    """
    kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
    return Model(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        vocab_size=args.padded_vocab_size,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        ffn_hidden_size=config.ffn_hidden_size,
        swiglu=config.gated_linear_unit,
        position_embedding_type="rope" if args.position_embedding_type == "rope" else "learned_absolute",
        max_position_embeddings=args.max_position_embeddings,
        normalization=config.normalization,
        add_bias_linear=config.add_bias_linear,
        untie_embeddings_and_output_weights=args.untie_embeddings_and_output_weights,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
        attention="unfused",
        attention_softmax_in_fp32=config.attention_softmax_in_fp32,
        mask_from_data=args.create_attention_mask_in_dataloader,
        fused_activation=config.bias_activation_fusion,
        dtype_bytes=torch.finfo(config.params_dtype).bits // 8,
        device=kind,
    )


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


def model_before_validation(args: Namespace) -> Model:
    """The model's shape as far as parsed arguments tell, before Megatron has validated them.

    Good enough to split layers over stages: the vocabulary is not padded yet, and Megatron's
    defaults are taken from ``spec``.
    """
    vocabulary = getattr(args, "padded_vocab_size", None) or args.vocab_size or 51200
    return Model(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        vocab_size=vocabulary,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        swiglu=args.swiglu,
        position_embedding_type="rope" if args.position_embedding_type == "rope" else "learned_absolute",
        max_position_embeddings=args.max_position_embeddings,
        normalization=args.normalization,
        add_bias_linear=args.add_bias_linear,
        untie_embeddings_and_output_weights=args.untie_embeddings_and_output_weights,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        attention="unfused",
        dtype_bytes=2 if args.bf16 or args.fp16 else 4,
    )
