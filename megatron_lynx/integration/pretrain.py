"""GPT training for ``python -m megatron_lynx.pretrain_gpt``: batches, loss, datasets, and the flow.

Megatron's wheel has the trainer but not the script that calls it; this is that script's part, for
GPT on ``GPTDataset`` or mock data, with the flags and the behaviour of upstream's
``pretrain_gpt.py``. What only upstream's script can do is refused, naming the flag.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_lynx.errors import ConfigError
from megatron_lynx.integration import flow
from megatron_lynx.integration.cpu.backend import cpu_backend_active

# What upstream uses where a flag is not given; evaluation has no default there and fails late.
ARGUMENT_DEFAULTS: dict[str, Any] = {"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000}

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

# Ten times the largest loss seen so far is reported as a spike, as upstream does.
_SPIKY_LOSS_FACTOR = 10

_UPSTREAM_ONLY = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "logits_load_dir": "--logits-load-dir",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "inprocess_restart": "--inprocess-restart",
}

# On CPU: the field, the value it must have, what to add to the command, whether for local layers alone.
_CPU_NEEDS: tuple[tuple[str, object, str, bool], ...] = (
    ("distributed_backend", "gloo", "--distributed-backend gloo", False),
    ("transformer_impl", "local", "--transformer-impl local", True),
    ("no_persist_layer_norm", True, "--no-persist-layer-norm", True),
    ("gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion", False),
    ("masked_softmax_fusion", False, "--no-masked-softmax-fusion", True),
)


def parse(argv: Sequence[str] | None) -> Namespace:
    """Megatron's arguments from ``argv`` (without the program's name; None means ``sys.argv``).

    Sets Megatron's global arguments and builds the tokenizer, as every Megatron script does.
    """
    with _command_line(argv):
        args = flow.parse(ARGUMENT_DEFAULTS)
    for field, flag in _UPSTREAM_ONLY.items():
        if getattr(args, field, None):
            raise ConfigError(
                f"{flag} is not supported by megatron_lynx.pretrain_gpt: drop it, or use "
                "`lynx run PATH/TO/pretrain_gpt.py` with upstream's script"
            )
    if cpu_backend_active():
        _check_for_cpu(args)
    return args


def _check_for_cpu(args: Namespace) -> None:
    """Megatron would fail later, at the first kernel that is missing, one flag at a time."""
    local = args.transformer_impl == "local" or not _te_runs_on_cpu()
    missing = [
        flag
        for field, value, flag, of_local_layers in _CPU_NEEDS
        if getattr(args, field, value) != value and (local or not of_local_layers)
    ]
    if local and args.position_embedding_type == "rope" and args.apply_rope_fusion:
        missing.append("--no-rope-fusion")
    if missing:
        raise ConfigError(f"training on CPU needs these flags too: {' '.join(missing)}")


def _te_runs_on_cpu() -> bool:
    """Whether Transformer Engine's kernels, as they are loaded, say that they run here; CUDA's do not."""
    return getattr(sys.modules.get("transformer_engine_torch"), "runs_on_cpu", False) is True


@contextlib.contextmanager
def _command_line(argv: Sequence[str] | None) -> Iterator[None]:
    """Megatron's parser reads ``sys.argv`` and nothing else."""
    original = sys.argv
    if argv is not None:
        sys.argv = [original[0], *argv]
    try:
        yield
    finally:
        sys.argv = original


def train(args: Namespace) -> None:
    """Run Megatron's trainer on a GPT with ``args``; returns when training is done."""
    flow.pretrain(args, ARGUMENT_DEFAULTS, datasets_provider, forward_step, get_embedding_ranks)


# --- one microbatch ------------------------------------------------------------------------------


def forward_step(
    data_iterator: Any, model: Any, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Forward pass of one microbatch; returns its output and the function that makes it a loss."""
    if return_schedule_plan:
        raise ConfigError("a schedule plan was asked for: drop --overlap-moe-expert-parallel-comm")
    timers, straggler = get_timers(), StragglerDetector()
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        batch = _next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    with straggler:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(loss_of, batch["loss_mask"])


def _next_batch(data_iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    """The tensors of the next microbatch that this rank needs; None for the others."""
    mtp = _has_mtp(vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not mtp:
        return dict.fromkeys(_BATCH_KEYS)
    return flow.microbatch(data_iterator, _BATCH_KEYS, mtp)


def _has_mtp(vp_stage: int | None) -> bool:
    """Whether this rank has multi-token prediction layers, which read the tokens too."""
    args = get_args()
    if args.mtp_num_layers is None:  # the config below is built anew at every call
        return False
    config = core_transformer_config_from_args(args)
    return bool(
        mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def loss_of(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss of a microbatch, its number of tokens, and both again for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    _check(loss)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def _check(loss: torch.Tensor) -> None:
    """Megatron's guards against NaN, infinity and spikes, by the same flags as upstream's."""
    args, machine = get_args(), get_rerun_state_machine()
    guards: list[tuple[Any, str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        guards += [(torch.isnan, "found NaN in local forward loss calculation", True)]
        guards += [(torch.isinf, "found Inf in local forward loss calculation", True)]
    if args.check_for_spiky_loss:
        unexpected = partial(machine.is_unexpectedly_large, threshold=_SPIKY_LOSS_FACTOR, context="loss")
        guards += [(unexpected, "Spiky loss", False)]
    for rejects, message, fatal in guards:
        machine.validate_result(
            result=loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=fatal
        )


# --- datasets and ranks --------------------------------------------------------------------------


def datasets_provider(samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test dataset with at least ``samples`` samples each."""
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    datasets = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        samples,
        partial(_reads_data, vp_stage),
        _dataset_config(args),
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    train, validation, test = datasets
    return train, validation, test


# Megatron asks the provider whether every rank is to call it.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _reads_data(vp_stage: int | None) -> bool:
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(vp_stage)


def _dataset_config(args: Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences_per_dataset,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold the word embedding, shared with the output layer or not."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)
