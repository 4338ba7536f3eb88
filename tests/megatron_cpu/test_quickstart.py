"""The main job of the README, shortened: it ends with its table, and the losses are equal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.launch import REPOSITORY


def test_the_quickstart_ends_with_equal_losses(tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "quickstart.py"
    command = [sys.executable, str(script), "--iterations", "3", "--methods", "none,lynx"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The losses are equal to the last bit." in done.stdout
    losses = re.findall(r"^ *(none|lynx) +(\d+\.\d{6,})", done.stdout, re.MULTILINE)
    assert [name for name, _ in losses] == ["none", "lynx"]
    assert losses[0][1] == losses[1][1]
    assert (tmp_path / "lynx" / "report" / "plan.txt").read_text().startswith("lynx-plan 2 windows")
    assert (tmp_path / "lynx.html").read_text().lstrip().lower().startswith("<!doctype html>")
