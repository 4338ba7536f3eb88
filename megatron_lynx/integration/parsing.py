"""What Megatron's own parser and lynx's refusals say of a command line, without starting anything."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence

from megatron.training import arguments

from megatron_lynx.errors import LynxError
from megatron_lynx.integration.arguments import check_arguments, with_lynx_arguments


def parser_complaint(words: Sequence[str]) -> str | None:
    """Why a run with these arguments would end before it starts, in one line; None if it would not."""
    errors, before = io.StringIO(), sys.argv
    sys.argv = ["pretrain_gpt.py", *words]
    try:
        with contextlib.redirect_stderr(errors):
            args = arguments.parse_args(with_lynx_arguments(None))
        check_arguments(args)
    except SystemExit:
        lines = errors.getvalue().strip().splitlines() or ["it ended without a word"]
        return f"Megatron's parser: {lines[-1].removeprefix('pretrain_gpt.py: error: ')}"
    except LynxError as error:
        return str(error)
    finally:
        sys.argv = before
    return None
