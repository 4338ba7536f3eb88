"""Megatron's compiled dataset helpers, as they come in the wheel.

At start Megatron runs ``make`` in its dataset folder and leaves the process when that fails. The
wheel has the compiled helpers but no makefile, so there it always fails.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path

from megatron.core.datasets import utils

from megatron_lynx.errors import ConfigError


@contextlib.contextmanager
def shipped_dataset_helpers() -> Iterator[None]:
    """Use the helpers of the wheel where Megatron has no makefile; changes nothing in a checkout."""
    original = utils.compile_helpers

    def compile_helpers() -> None:
        if (Path(utils.__file__).parent / "Makefile").exists():
            original()
            return
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError as error:
            raise ConfigError(
                "Megatron's dataset helpers (megatron.core.datasets.helpers_cpp) are neither compiled nor "
                "compilable here: install the megatron-core wheel for this Python version"
            ) from error

    utils.compile_helpers = compile_helpers
    try:
        yield
    finally:
        utils.compile_helpers = original
