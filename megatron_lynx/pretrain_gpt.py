"""Trains a GPT with Megatron, from the wheels alone: ``python -m megatron_lynx.pretrain_gpt ARGS``.

Takes the flags of upstream's ``pretrain_gpt.py``, and ``--recompute-method lynx``. With ``MEGATRON_LYNX_CPU=1`` it trains on the CPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from megatron_lynx.errors import LynxError
from megatron_lynx.integration import pretrain
from megatron_lynx.integration.cpu import cpu_backend_if_requested
from megatron_lynx.integration.dataset_helpers import shipped_dataset_helpers
from megatron_lynx.integration.norm import sequence_parallel_norm
from megatron_lynx.integration.recorder import recorder_if_requested
from megatron_lynx.integration.trainer import lynx_trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Parse ``argv`` (None means the command line), install, and call Megatron's trainer."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_backend_if_requested())
        stack.enter_context(sequence_parallel_norm())
        stack.enter_context(shipped_dataset_helpers())
        stack.enter_context(recorder_if_requested())
        stack.enter_context(lynx_trainer())
        args = pretrain.parse(argv)
        pretrain.train(args)


if __name__ == "__main__":
    try:
        main()
    except LynxError as error:
        print(f"pretrain_gpt: {error}", file=sys.stderr)
        sys.exit(2)
