"""How Megatron's trainer is parsed for, fed and called, by version.

Three ways: up to 0.17 ``pretrain()`` parses by itself and is given a function that builds the model; in
0.18 it is given the parsed arguments; from 0.19 on it builds the model from a configuration. Before 0.19
the model that it is given here is upstream's for dense GPTs; what else upstream's scripts build is refused.
"""

from __future__ import annotations

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import arguments, get_args, initialize, training, utils

from megatron_lynx.errors import ConfigError
from megatron_lynx.integration import versions

_BUILT_BY_UPSTREAM_ONLY = {
    "num_experts": "--num-experts",
    "mtp_num_layers": "--mtp-num-layers",
    "spec": "--spec",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "experimental_attention_variant": "--experimental-attention-variant",
    "use_legacy_models": "--use-legacy-models",
    "yaml_cfg": "--yaml-cfg",
}
"""Flags of models that only upstream's scripts build before 0.19."""

_FIRST_WITH_PARSED, _FIRST_WITH_CONFIG = (0, 18), (0, 19)


def _release() -> tuple[int, int]:
    found = versions.find_megatron()
    return found.release if found is not None else versions.NEWEST


def parse(defaults: dict[str, Any]) -> Namespace:
    """Megatron's arguments from the command line; validated, and set as global arguments, where the
    trainer does not do that by itself (from 0.18 on)."""
    if _release() >= _FIRST_WITH_PARSED:
        args: Namespace = arguments.parse_and_validate_args(args_defaults=defaults)
    else:
        args = arguments.parse_args()
    if _release() < _FIRST_WITH_CONFIG:
        for field, flag in _BUILT_BY_UPSTREAM_ONLY.items():
            value = getattr(args, field, None)
            if value:
                raise ConfigError(
                    f"{flag} {value} is not supported by megatron_lynx.pretrain_gpt with "
                    f"{versions.find_megatron()}: use `lynx run PATH/TO/pretrain_gpt.py`"
                )
    return args


def pretrain(
    args: Namespace,
    defaults: dict[str, Any],
    datasets_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    get_embedding_ranks: Callable[[list[int]], list[int]],
) -> None:
    """Call the trainer with ``args`` of ``parse``; returns when training is done."""
    # By attribute, not by name: what is installed into the trainer must take effect here.
    ranks = {"get_embedding_ranks": get_embedding_ranks}
    kind = ModelType.encoder_or_decoder
    if _release() < _FIRST_WITH_PARSED:
        with _parsed(args):
            training.pretrain(datasets_provider, _model, kind, forward_step, args_defaults=defaults, **ranks)
        return
    of_arguments = importlib.import_module("megatron.training.argument_utils")
    if _release() < _FIRST_WITH_CONFIG:
        config = of_arguments.pretrain_cfg_container_from_args(args)
        training.pretrain(config, datasets_provider, _model, kind, forward_step, **ranks)
        return
    config = of_arguments.pretrain_cfg_container_from_args(args, of_arguments.gpt_config_from_args(args))
    training.pretrain(config, datasets_provider, kind, forward_step, **ranks)


@contextlib.contextmanager
def _parsed(args: Namespace) -> Iterator[None]:
    """Up to 0.17 the trainer parses the command line: here it gets what was parsed before."""

    def parsed(*_: Any) -> Namespace:
        return args

    original = initialize.parse_args
    initialize.parse_args = parsed
    try:
        yield
    finally:
        initialize.parse_args = original


def _model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """A dense GPT as upstream's scripts build it from the same flags."""
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    if args.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            qk_l2_norm=config.qk_l2_norm,
        )
    else:
        layer = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def microbatch(data_iterator: Any, keys: tuple[str, ...], mtp: bool) -> dict[str, Any]:
    """The tensors of the next microbatch that this rank needs; None for the others.

    The first rank of a tensor parallel group reads, the others receive from it.
    """
    if _release() < _FIRST_WITH_PARSED:
        received = utils.get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=mtp)
        return get_batch_on_this_cp_rank({key: received.get(key) for key in keys})
    args = get_args()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        data = next(data_iterator)
        for key in keys:
            value = data.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    packed = "has_cu_seqlens" if _release() >= _FIRST_WITH_CONFIG else "is_sft"
    receive = importlib.import_module("megatron.core.utils").get_batch_on_this_tp_rank
    batch = receive(
        batch,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
        **{packed: False},
    )
    return get_batch_on_this_cp_rank(
        {key: batch.get(key) for key in (*keys, "cu_seqlens")},
        is_hybrid_cp=False,
        cp_group=parallel_state.get_context_parallel_group(),
    )
