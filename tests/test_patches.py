"""The patches are small, listed, and apply to the Megatron-Core that is installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_lynx.cli.main import main
from megatron_lynx.cli.patch import FOLDERS, PATCHES

RELEASES = sorted(folder for folder in PATCHES.iterdir() if folder.is_dir() and folder.name[0] != "_")


def test_there_is_a_folder_for_every_release_that_is_known() -> None:
    assert sorted(FOLDERS.values()) == [folder.name for folder in RELEASES]


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
def test_the_series_lists_every_patch(folder: Path) -> None:
    listed = (folder / "series").read_text().split()
    assert listed == sorted(path.name for path in folder.glob("*.patch"))


@pytest.mark.parametrize(
    "path", sorted(PATCHES.glob("*/*.patch")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_a_patch_carries_only_the_lines_it_needs(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 40
    hunks = lines[next(i for i, line in enumerate(lines) if line.startswith("@@")) :]
    theirs = [line for line in hunks if line[:1] in (" ", "-")]
    assert len(theirs) == sum(line.startswith("@@") for line in hunks)
    assert any(line.startswith("+") for line in hunks)


def test_the_patches_apply_to_the_wheel(tmp_path: Path) -> None:
    """By ``lynx patch`` and by git, with the same result; the wheel has no ``pretrain_gpt.py``."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.submodule_search_locations
    source = Path(next(iter(found.submodule_search_locations))).parent
    ours, gits = tmp_path / "ours", tmp_path / "gits"
    files = (
        "core/package_info.py",
        "core/transformer/transformer_config.py",
        "training/arguments.py",
        "training/yaml_arguments.py",
    )
    for tree in (ours, gits):
        for name in files:
            (tree / "megatron" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, tree / "megatron" / name)
        (tree / "pretrain_gpt.py").write_text("    # Optionally enable inprocess restart on pretrain\n")
    assert main(["patch", "apply", str(ours)]) == 0
    subprocess.run(["git", "init", "-q"], cwd=gits, check=True)
    for name in (PATCHES / "0.19" / "series").read_text().split()[:-1]:
        subprocess.run(["git", "apply", "--unidiff-zero", str(PATCHES / "0.19" / name)], cwd=gits, check=True)
    for name in files:
        assert (ours / "megatron" / name).read_bytes() == (gits / "megatron" / name).read_bytes()
    config = (ours / "megatron" / files[1]).read_text()
    assert "Literal['uniform', 'block', 'lynx']" in config
    assert main(["patch", "revert", str(ours)]) == 0
    for name in files:
        assert (ours / "megatron" / name).read_bytes() == (source / name).read_bytes()
