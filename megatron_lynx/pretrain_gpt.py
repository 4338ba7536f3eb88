"""Trains a GPT with Megatron, from the wheels alone: ``python -m megatron_lynx.pretrain_gpt ARGS``.

Takes the flags of upstream's ``pretrain_gpt.py``, and ``--recompute-method lynx`` with its own. With
``MEGATRON_LYNX_CPU=1`` it trains on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_lynx.errors import LynxError
from megatron_lynx.integration.entry import megatron_run


def main(argv: Sequence[str] | None = None) -> None:
    """Parse ``argv`` (None means the command line), install, and call Megatron's trainer."""
    with megatron_run():
        # Imported now: it imports Megatron, which has just been found to be there and in order.
        from megatron_lynx.integration import pretrain

        pretrain.train(pretrain.parse(argv))


if __name__ == "__main__":
    try:
        main()
    except LynxError as error:
        print(f"pretrain_gpt: {error}", file=sys.stderr)
        sys.exit(2)
