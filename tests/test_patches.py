"""The patches are small, listed, and apply to the Megatron-Core that is installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parents[1] / "patches"
FOLDERS = sorted(folder for folder in PATCHES.iterdir() if folder.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_series_lists_every_patch(folder: Path) -> None:
    listed = (folder / "series").read_text().split()
    assert listed == sorted(path.name for path in folder.glob("*.patch"))


@pytest.mark.parametrize("path", sorted(PATCHES.glob("*/*.patch")), ids=lambda path: path.name)
def test_a_patch_carries_only_the_lines_it_needs(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 40
    hunk = lines[next(i for i, line in enumerate(lines) if line.startswith("@@")) + 1 :]
    assert sum(line.startswith(" ") or not line for line in hunk) <= 2
    assert any(line.startswith("+") for line in hunk)


def test_the_configuration_patch_applies_to_the_wheel(tmp_path: Path) -> None:
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.submodule_search_locations
    source = Path(next(iter(found.submodule_search_locations))) / "transformer" / "transformer_config.py"
    target = tmp_path / "megatron" / "core" / "transformer" / "transformer_config.py"
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)
    patch = PATCHES / "0.19" / "0001-config-know-lynx.patch"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    assert "Literal['uniform', 'block', 'lynx']" in target.read_text()
