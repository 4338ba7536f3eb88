"""Checkpoints across a changed split: which moves Megatron can make, and what makes the others possible.

Weights are saved by their layer's number in the whole model, so any split loads them. The state of a
distributed optimizer is saved by buckets of one split (``dp_reshardable``), unless
``--dist-ckpt-optim-fully-reshardable`` was given when it was saved. The oldest format, a file for each rank,
knows one split for everything.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_lynx.checkpoint import Saved
from megatron_lynx.partition.layout import parse_layout

Split = tuple[tuple[int, ...], ...]
"""By pipeline stage, the number of layers of each of its chunks."""

_ANY_SPLIT = ("fully_reshardable", "fully_sharded_model_space")
_BY_RANK = "model_optim_rng.pt"
"""The file of Megatron's oldest format, one for each rank."""
_SHAPE = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
    *("position_embedding_type", "untie_embeddings_and_output_weights", "add_bias_linear", "swiglu"),
)
"""Fields that decide which weights there are."""


def split_of(args: Namespace) -> Split | None:
    """The split that Megatron's validated arguments mean; None if they leave it open."""
    layers, pp = getattr(args, "num_layers", None), getattr(args, "pipeline_model_parallel_size", 1) or 1
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str):
        counts = parse_layout(layout, pp).counts
        return tuple(tuple(counts[stage::pp]) for stage in range(pp))
    if not isinstance(layers, int):
        return None
    vpp = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    first = getattr(args, "decoder_first_pipeline_num_layers", None)
    last = getattr(args, "decoder_last_pipeline_num_layers", None)
    inner = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if inner and rest % inner:
        return None
    by_stage = [rest // inner if inner else 0] * inner
    by_stage = ([first] if first is not None else []) + by_stage + ([last] if last is not None else [])
    return tuple((count // vpp,) * vpp for count in by_stage)


def shown(split: Split) -> str:
    """A split for people: ``2+2``, with chunks ``1,1+1,1``."""
    return "+".join(",".join(map(str, chunks)) for chunks in split)


def refused_move(saved: Saved, args: Namespace, flag: str) -> str | None:
    """Why Megatron cannot load ``saved`` under validated ``args``, in one line with what works; None if it
    can. ``flag`` says which checkpoint is meant."""
    before, now = saved.arguments, args
    for field in _SHAPE:
        was, is_now = getattr(before, field, None), getattr(now, field, None)
        if was is not None and is_now is not None and was != is_now:
            return f"{flag} is of another model: {_name(field)} {was}, not {is_now}; {_works(field, was)}"
    moved = _moved(before, now)
    if moved and saved.file.name == _BY_RANK:
        return (
            f"{flag} was saved with {moved}, by --ckpt-format torch, a file for each rank, which the same "
            "sizes alone can load: save it again, with the old ones, by --ckpt-format torch_dist"
        )
    if getattr(args, "no_load_optim", False) or getattr(args, "finetune", False):
        return None
    if getattr(before, "no_save_optim", False):
        return None
    return _refused_optimizer(saved, args, moved, flag)


def _moved(before: Namespace, now: Namespace) -> str | None:
    """Which weights another rank has, in words that follow "was saved with"; None if each has its own."""
    was, is_now = (getattr(one, "tensor_model_parallel_size", None) for one in (before, now))
    if was is not None and is_now is not None and was != is_now:
        return f"--tensor-model-parallel-size {was} and is to be loaded with {is_now}"
    split, wanted = split_of(before), split_of(now)
    if split is None or split == wanted:
        return None
    return (
        f"{shown(split)} layers by stage and is to be loaded with "
        f"{shown(wanted) if wanted else 'another split'}"
    )


def _refused_optimizer(saved: Saved, args: Namespace, moved: str | None, flag: str) -> str | None:
    was, is_now = (bool(getattr(one, "use_distributed_optimizer", False)) for one in (saved.arguments, args))
    if was != is_now:
        does = "with" if was else "without"
        works = "--use-distributed-optimizer works" if was else "leave --use-distributed-optimizer out"
        return (
            f"{flag} was saved {does} --use-distributed-optimizer, whose state is laid out "
            f"otherwise; {works}, or "
            "--no-load-optim to start with a fresh optimizer"
        )
    if not was or saved.optimizer_sharding in _ANY_SPLIT or moved is None:
        return None
    return (
        f"{flag} was saved with {moved}, and the distributed optimizer's state was saved for one split: save "
        "it again, with the old split, by --dist-ckpt-optim-fully-reshardable, which any split "
        "loads; or --no-load-optim starts with a fresh optimizer"
    )


def _name(field: str) -> str:
    return "--" + field.replace("_", "-")


def _works(field: str, value: Any) -> str:
    return (
        f"{_name(field)} {value} works" if not isinstance(value, bool) else "the model that was saved works"
    )


_SCHEDULE = ("train_iters", "lr_decay_iters", "global_batch_size")


def refused_schedule(saved: Saved, args: Namespace, flag: str) -> str | None:
    """Why the schedule of the learning rate that ``saved`` holds does not load under ``args``, in one line
    with what works; None if it does, as far as the lengths of the run tell."""
    switches = (
        *("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        *("no_load_optim", "finetune"),
    )
    if any(getattr(args, switch, False) for switch in switches):
        return None
    if getattr(saved.arguments, "train_samples", None):
        return None
    for field in _SCHEDULE:
        was, is_now = getattr(saved.arguments, field, None), getattr(args, field, None)
        if was is not None and is_now is not None and was != is_now:
            return (
                f"{flag} was saved by a run with {_name(field)} {was}, not {is_now}, and its schedule of the "
                "learning rate with it: --override-opt-param-scheduler takes this command line's, "
                "--use-checkpoint-opt-param-scheduler the checkpoint's"
            )
    return None
