"""Training on a GPU equals stock to the last bit and keeps what is planned. NOT RUN ON A GPU YET."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import REPOSITORY

pytestmark = pytest.mark.gpu
_UNAVAILABLE = "No dot product attention backend is available"
"""What Transformer Engine says of an attention that this device or its libraries do not have."""

Rows = dict[str, dict[str, dict[str, Any]]]
"""By job and plan."""


def checked(folder: Path, *flags: str, **environment: str) -> Rows:
    """Run the check; its rows."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.check", str(folder), *flags],
        cwd=REPOSITORY,
        env=os.environ | environment,
        timeout=450,
        check=False,
    )
    rows: Rows = {}
    for text in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(text)
        rows.setdefault(row["job"], {})[row["plan"]] = row
    assert done.returncode == 0
    return rows


def faults(rows: Rows) -> Iterator[str]:
    """What is wrong with the rows of a check."""
    for job, plans in rows.items():
        stock = plans["stock"]
        if _UNAVAILABLE in stock["error"]:
            continue
        for plan, row in plans.items():
            if row["error"]:
                yield f"{job}, {plan}: {row['error']}"
                continue
            if len(row["losses"]) != len(stock["losses"]) or not row["losses"]:
                yield f"{job}, {plan}: {len(row['losses'])} steps"
            if row["losses"] != stock["losses"] or row["gradients"] != stock["gradients"]:
                yield f"{job}, {plan}: losses or gradients differ from stock's"
            if row["kept_bytes"] != row["planned_kept_bytes"]:
                yield f"{job}, {plan}: keeps {row['kept_bytes']}, planned {row['planned_kept_bytes']}"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    folder = Path(os.environ.get("LYNX_GPU_CHECK") or tmp_path_factory.mktemp("gpu"))
    return checked(folder)


def test_every_run_equals_stock_and_keeps_what_was_planned(rows: Rows) -> None:
    assert list(faults(rows)) == []


def test_dropping_activations_lowers_the_peak(rows: Rows) -> None:
    for plans in rows.values():
        if "full-uniform-1" in plans and not plans["stock"]["error"]:
            peaks = [
                plans[plan]["activation_peak_bytes"] for plan in ("full-uniform-1", "selective", "stock")
            ]
            assert peaks == sorted(peaks)
            assert peaks[0] < peaks[-1]
