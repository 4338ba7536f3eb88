"""A small GPT trained by stock Megatron core: model, DDP, optimizer and schedule, as one function.

Runs inside a rank of ``run_ranks``. The tokens are drawn from a seed, so every call with the same
arguments sees the same data.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.support.frozen import freeze

VOCABULARY = 64
SEQUENCE = 16
MICRO_BATCH = 2
MICROBATCHES = 4
LAYERS = 4
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
}
"""By the names that options travel under: a function does not before Megatron is imported."""


def train_small_gpt(
    *,
    steps: int,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    cp: int = 1,
    sequence_parallel: bool = False,
    bf16: bool = False,
    dropout: float = 0.1,
    attention_dropout: float | None = None,
    rope: bool = False,
    rotary_percent: float = 1.0,
    te: bool = False,
    spec: Callable[[], Any] | None = None,
    fusion: bool = False,
    attention: str = "auto",
    activation: str = "gelu",
    frozen: str = "",
    untied: bool = False,
    shape: tuple[int, int] = (MICRO_BATCH, SEQUENCE),
    lengths: str = "",
    seed: int = 1234,
    keep_gradients: bool = True,
    around: Callable[[list[Any]], contextlib.AbstractContextManager[Callable[..., Any]]] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Train for ``steps`` optimizer steps; ``fields`` go to ``TransformerConfig``.

    ``dropout`` is that of attention too, unless ``attention_dropout`` says otherwise. ``te`` builds the
    layers of Transformer Engine's spec, not of the local one; ``spec`` makes the spec of others.
    ``attention`` is Megatron's attention backend, ``activation`` a name of ``ACTIVATIONS``, ``shape`` a
    microbatch's: sequences and their length.
    ``lengths`` is empty where all have that length, ``varied`` where it differs from microbatch to
    microbatch, ``packed`` where one row of that length holds several sequences.
    ``frozen`` says what does not train (``tests.support.frozen``), ``untied`` that the output layer has a
    weight of its own.
    ``fusion`` lets linears add to the main gradients by themselves (``standing_in_for_apex``) while DDP
    reduces them beside the backward, in buckets of 2,000 numbers.
    ``around(chunks)`` is a context entered for the training; it yields what wraps the schedule.
    Returns ``losses`` (one list of microbatch losses per step; empty but on the last stage),
    ``grad_norms`` and ``gradients`` (one per step; none without ``keep_gradients``) and
    ``parameters`` (name to tensor, after the last step).
    """
    _initialize(tp, pp, vpp, cp)
    _forget_attention_backend()
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel,
        hidden_dropout=dropout,
        attention_dropout=dropout if attention_dropout is None else attention_dropout,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=fusion,
        deallocate_pipeline_outputs=pp > 1,
        attention_backend=AttnBackend[attention],
        activation_func=ACTIVATIONS[activation],
        variable_seq_lengths=lengths == "varied",
        moe_token_dispatcher_type="alltoall",  # Megatron wants that for varied lengths, experts or not
        **fields,
    )
    positions = ("rope", rotary_percent) if rope else ("learned_absolute", 1.0)
    layer = spec() if spec else _layer_spec(config, te)
    chunks = _build(config, vpp, positions, (layer, te), shape[1], frozen, untied)
    with around(chunks) if around else contextlib.nullcontext(lambda schedule: schedule) as wrap:
        return _train(chunks, config, steps, vpp, seed, wrap, keep_gradients, shape, lengths)


def _initialize(tp: int, pp: int, vpp: int | None, cp: int) -> None:
    """Megatron's process groups, made anew only for other sizes: each keeps threads that poll for as
    long as the process lives, and a thousand of them leave little time for anything else."""
    sizes = (tp, pp, vpp, cp)
    if _made and _made[-1] == sizes:
        return
    if _made:
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, vpp, context_parallel_size=cp)
    _made.append(sizes)


_made: list[tuple[int, int, int | None, int]] = []
"""The sizes that model parallelism had in this process; the last ones are in force."""


def _forget_attention_backend() -> None:
    """Megatron writes the choice into the environment and holds every later model to it; TE keeps it too."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    chosen = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention")
    if chosen is not None:
        chosen._attention_backends["attention_params"] = None


def _build(
    config: TransformerConfig,
    vpp: int | None,
    positions: tuple[Any, float],
    layer: tuple[Any, bool],
    sequence: int,
    frozen: str,
    untied: bool,
) -> list[Any]:
    chunks = []
    for stage in range(vpp or 1):
        vp_stage = stage if vpp else None
        spec, te = layer
        predictions = None
        if config.mtp_num_layers:
            predictions = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=te, vp_stage=vp_stage)
        model: torch.nn.Module = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=sequence,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type=positions[0],
            rotary_percent=positions[1],
            vp_stage=vp_stage,
            mtp_block_spec=predictions,
            share_embeddings_and_output_weights=not untied,
        )
        model.model_type = ModelType.encoder_or_decoder
        if frozen:
            freeze(model, frozen)
        if config.bf16:
            model = Float16Module(config, model)
        fusion = config.gradient_accumulation_fusion
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.bf16 or fusion,
            use_distributed_optimizer=False,
            overlap_grad_reduce=fusion,
            bucket_size=2000 if fusion else None,
        )
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=stage > 0))
    return chunks


def _layer_spec(config: TransformerConfig, te: bool) -> Any:
    if te:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    return get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)


@contextlib.contextmanager
def standing_in_for_apex() -> Iterator[None]:
    """Inside, Megatron's linears find what Apex's extension does for them: weight gradients that are added
    to the main gradient in the kernel."""

    def accumulate(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        total.add_(gradient.t().matmul(inputs))

    module = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    before = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available, layers.fused_weight_gradient_mlp_cuda = True, module
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = before
        del layers.fused_weight_gradient_mlp_cuda


Microbatch = tuple[torch.Tensor, PackedSeqParams | None]


def _microbatches(seed: int, replica: int, shape: tuple[int, int], lengths: str) -> Iterator[Microbatch]:
    draws = torch.Generator().manual_seed(seed + replica)
    sequences, length = shape
    for number in itertools.count():
        here = length * (2 + number % 3) // 4 if lengths == "varied" else length
        text = torch.randint(VOCABULARY, (sequences, here + 1), generator=draws)
        yield text, _packed(length, 1 + number % 3) if lengths == "packed" else None


def _packed(length: int, cuts: int) -> PackedSeqParams:
    """A row of ``length`` tokens that holds ``cuts`` short sequences and a long one."""
    ends = torch.tensor([*range(0, 3 * cuts, 3), length], dtype=torch.int32)
    longest = int(ends.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _forward_step(data: Iterator[Microbatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    text, packed = next(data)
    positions = torch.arange(text.shape[1] - 1).expand(text.shape[0], -1)
    tokens, positions, labels = (_own_part(part) for part in (text[:, :-1], positions, text[:, 1:]))
    return model(tokens, positions, None, labels=labels, packed_seq_params=packed), _loss


def _own_part(tokens: torch.Tensor) -> torch.Tensor:
    """What a context-parallel rank has of all tokens: the r-th part from the start and the r-th from the end,
    as Megatron splits them."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    parts = tokens.chunk(2 * size, dim=1)
    return torch.cat((parts[rank], parts[-1 - rank]), dim=1) if size > 1 else tokens.contiguous()


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = output.float().mean()
    return loss, {"loss": loss.item()}


def _train(
    chunks: list[Any],
    config: TransformerConfig,
    steps: int,
    vpp: int | None,
    seed: int,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    keep_gradients: bool,
    shape: tuple[int, int],
    lengths: str,
) -> dict[str, Any]:
    precision = {"bf16": True} if config.bf16 else {}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, clip_grad=1.0, params_dtype=config.params_dtype, **precision
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = partial(finalize_model_grads)
    if config.gradient_accumulation_fusion:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if vpp else chunks[0].no_sync
    schedule = wrap(get_forward_backward_func())
    replica = parallel_state.get_data_parallel_rank()
    data = [_microbatches(seed, replica, shape, lengths) for _ in chunks]
    losses, grad_norms, gradients = [], [], []
    for _ in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = schedule(
            forward_step_func=_forward_step,
            data_iterator=data if vpp else data[0],
            model=chunks if vpp else chunks[0],
            num_microbatches=MICROBATCHES,
            seq_length=shape[1],
            micro_batch_size=shape[0],
            forward_only=False,
        )
        if keep_gradients:
            gradients.append(_gradients(chunks))
        _, grad_norm, _ = optimizer.step()
        losses.append([report["loss"] for report in reports])
        grad_norms.append(float(grad_norm))
    return {
        "losses": [step for step in losses if step],
        "grad_norms": grad_norms,
        "gradients": gradients,
        "parameters": {name: p.detach().clone() for name, p in _named_parameters(chunks)},
    }


def _named_parameters(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.module.named_parameters():
            yield f"{stage}.{name}", parameter


def _gradients(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """The gradient of every parameter that trains, as it goes into the optimizer."""
    return {name: p.main_grad.clone() for name, p in _named_parameters(chunks) if p.requires_grad}
