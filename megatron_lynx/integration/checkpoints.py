"""A checkpoint against the run that loads it, before anything is built.

Megatron finds out while it loads, on some ranks only: "Global shape mismatch", without a word of the
split, and the other ranks wait for them. Here every rank reads the same file and says the same.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron_lynx.checkpoint import iteration_folder, latest_iteration, read_checkpoint
from megatron_lynx.errors import ConfigError
from megatron_lynx.partition.moves import refused_move, refused_schedule


def check_checkpoint(args: Namespace) -> None:
    """Refuse to load what Megatron could not.

    ``args`` are validated, so that the split is known.

    Raises:
        ConfigError: names the flag that makes the move possible.
    """
    if not args.load:
        return
    folder, flag = Path(args.load), f"--load {args.load}"
    step = getattr(args, "ckpt_step", None)
    iteration = str(step) if step is not None else latest_iteration(folder)
    if iteration is None:
        return  # the first start: Megatron says so and trains from random weights
    try:
        saved = read_checkpoint(iteration_folder(folder, iteration), flag)
    except ConfigError:
        return  # of a format without this file: Megatron's to read, or to refuse
    reason = refused_move(saved, args, flag) or refused_schedule(saved, args, flag)
    if reason is not None:
        raise ConfigError(reason)
