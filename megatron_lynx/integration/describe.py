"""The job that Megatron's arguments describe, in megatron_lynx's own nouns."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from megatron_lynx.integration.cpu.backend import cpu_backend_active
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel


def model_of(args: Namespace, config: Any, device: torch.device) -> Model:
    """The model's shape.

    ``config`` is Megatron's TransformerConfig, which has resolved what depends on other flags;
    ``device`` is where the weights are.
    """
    return Model(
        vocab_size=args.padded_vocab_size,
        mask_from_data=args.create_attention_mask_in_dataloader,
        position_embedding_type=_positions(args),
        rotary_percent=args.rotary_percent,
        max_position_embeddings=args.max_position_embeddings,
        untie_embeddings_and_output_weights=args.untie_embeddings_and_output_weights,
        mtp_num_layers=config.mtp_num_layers or 0,
        cross_entropy_loss_fusion=config.cross_entropy_loss_fusion,
        cross_entropy_fusion_impl=getattr(config, "cross_entropy_fusion_impl", "native"),
        **layer_options(config, args.transformer_impl, device),
    )


def layer_options(config: Any, transformer_impl: str, device: torch.device) -> dict[str, Any]:
    """The fields of a ``Model`` that Megatron's TransformerConfig decides; ``device`` is where the weights
    are."""
    quick = config.activation_func is quick_gelu
    window = getattr(config, "window_size", None)
    return {
        **{name: getattr(config, name) for name in _SAME},
        "swiglu": config.gated_linear_unit and not quick,
        "quick_geglu": config.gated_linear_unit and quick,
        "squared_relu": config.activation_func is squared_relu,
        "fused_activation": config.bias_activation_fusion,
        **{name: getattr(config, name, default) for name, default in _NEWER.items()},
        "window_size": None if window is None else (int(window[0]), int(window[1])),
        "transformer_impl": transformer_impl,
        "attention": _attention(config, transformer_impl),
        "dtype_bytes": torch.finfo(config.params_dtype).bits // 8,
        "device": "cuda" if device.type == "cuda" else "cpu",
    }


_SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("ffn_hidden_size", "normalization", "add_bias_linear", "attention_dropout", "hidden_dropout"),
    *("attention_softmax_in_fp32", "masked_softmax_fusion", "apply_rope_fusion", "qk_layernorm"),
)
_NEWER = {
    "activation_func_clamp_value": None,
    "use_te_activation_func": False,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
}
"""Options that the oldest Megatron may not have, and what it does without."""


def _attention(config: Any, transformer_impl: str) -> Literal["flash", "fused", "unfused"]:
    """The kernels of attention. Where the choice is left to Transformer Engine, it takes cuDNN's from
    Hopper on and the flash-attn package before (``get_attention_backend``)."""
    backend = config.attention_backend.name
    if transformer_impl == "local" or backend in ("unfused", "local"):
        return "unfused"
    if backend in ("flash", "fused"):
        return "flash" if backend == "flash" else "fused"
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return "fused" if hopper else "flash"


def _positions(args: Namespace) -> Literal["learned_absolute", "rope", "yarn", "none"]:
    """The embedding of positions as far as it changes a layer; multimodal rotation is as wide as plain."""
    kind = args.position_embedding_type
    if kind == "yarn":
        return "yarn"
    if kind in ("rope", "mrope"):
        return "rope"
    return "none" if kind == "none" else "learned_absolute"


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
        cp=args.context_parallel_size,
        cp_comm_type=(getattr(args, "cp_comm_type", None) or ["p2p"])[0],
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
    return Model(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        normalization=args.normalization,
        add_bias_linear=args.add_bias_linear,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        position_embedding_type=_positions(args),
        max_position_embeddings=args.max_position_embeddings,
        untie_embeddings_and_output_weights=args.untie_embeddings_and_output_weights,
        mtp_num_layers=args.mtp_num_layers or 0,
        transformer_impl=args.transformer_impl,
        vocab_size=getattr(args, "padded_vocab_size", None) or args.vocab_size or 51200,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        swiglu=args.swiglu,
        dtype_bytes=2 if args.bf16 or args.fp16 else 4,
    )
