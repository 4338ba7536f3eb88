"""Functions that run inside ranks: train from a checkpoint, or say why not."""

from __future__ import annotations

import contextlib
import os

from megatron_lynx.errors import LynxError

Run = tuple[str, list[str]]
"""A folder for the losses, and the arguments."""


def train(rank: int, world_size: int, payload: list[Run]) -> list[str]:
    """Run the entry's parts with each argument list; what each was refused with, or nothing."""
    from megatron.training import training

    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.cpu.optimizer_state import loadable_optimizer_state
    from megatron_lynx.integration.recorder import recorder_if_requested
    from megatron_lynx.integration.trainer import lynx_trainer

    found = []
    for record, argv in payload:
        os.environ["MEGATRON_LYNX_RECORD"] = record
        refused = ""
        with (
            contextlib.suppress(SystemExit),
            loadable_optimizer_state(),
            recorder_if_requested(),
            lynx_trainer(),
        ):
            try:
                pretrain.train(pretrain.parse(argv))
            except LynxError as error:
                refused = str(error)
        found.append(refused)
        training.destroy_global_state()
    return found
