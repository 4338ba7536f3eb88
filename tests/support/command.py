"""The ``lynx`` command, run inside the test's own process, and a job to give it."""

from __future__ import annotations

import pytest

from megatron_lynx.cli.main import main

SMALL = ("--model", "gpt-1.3b", "--num-layers", "8", "--tp", "2", "--pp", "4", "--cluster", "a100-40g-pcie")
TIGHT = (*SMALL, "--micro-batch-size", "16", "--vocab-size", "8192", "--budget", "6GiB")

Captured = pytest.CaptureFixture[str]


def lynx(capsys: Captured, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
