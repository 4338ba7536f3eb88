"""Which Megatron is there, where, and what is wrong with it: one line, whichever way in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY

INFO = "MAJOR = 0\nMINOR = {}\nPATCH = 1\nPRE_RELEASE = ''\n"


def made(folder: Path, minor: int = 19, *, core: str = "", trainer: str | None = "") -> Path:
    """A folder with a Megatron of that minor version whose packages hold just these statements."""
    for name, text in (("core", core), ("training", trainer)):
        if text is not None:
            (folder / "megatron" / name).mkdir(parents=True)
            (folder / "megatron" / name / "__init__.py").write_text(text)
    (folder / "megatron" / "core" / "package_info.py").write_text(INFO.format(minor))
    (folder / "megatron" / "__init__.py").touch()
    return folder


def said(*path: Path, command: tuple[str, ...] = ("-m", "megatron_lynx.pretrain_gpt")) -> str:
    """What training says, which must be one line and exit code 2."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, REPOSITORY)))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_without_a_trainer_or_too_old(tmp_path: Path) -> None:
    line = said(made(tmp_path / "a", 16, trainer=None))
    assert f"megatron-core 0.16.1 in {tmp_path / 'a'} has no trainer" in line
    line = said(made(tmp_path / "b", 15))
    assert f"megatron-core 0.15.1 in {tmp_path / 'b'} is older than what works" in line
    assert "0.17.1, 0.18.2" in line


def test_two_megatrons_are_not_mixed(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", trainer=None), made(tmp_path / "two", 18)
    for folder in (one, two):
        (folder / "megatron" / "__init__.py").unlink()
    line = said(one, two)
    assert f"megatron.core 0.19.1 comes from {one}, megatron.training from {two}" in line


def test_a_broken_megatron_is_named(tmp_path: Path) -> None:
    line = said(made(tmp_path / "a", core="import no_such_package"))
    assert "import megatron.core fails: ModuleNotFoundError: No module named 'no_such_package'" in line
    assert f"found megatron-core 0.19.1 in {tmp_path / 'a'}" in line


def test_the_empty_transformer_engine_is_named(tmp_path: Path) -> None:
    """The package without its parts raises on import, and Megatron imports it wherever it is."""
    engine = tmp_path / "te" / "transformer_engine"
    engine.mkdir(parents=True)
    (engine / "__init__.py").write_text(
        "raise RuntimeError('Found empty meta package installed. Install it.')"
    )
    line = said(tmp_path / "te", made(tmp_path / "a", core="import transformer_engine"))
    assert f"the package transformer-engine in {tmp_path / 'te'} cannot be imported" in line
    assert "Found empty meta package installed; `pip uninstall transformer-engine` works" in line


def test_without_torch(tmp_path: Path) -> None:
    hide = (
        "import sys; sys.modules['torch'] = None; from megatron_lynx.cli.main import main; sys.exit(main({}))"
    )
    script = tmp_path / "script.py"
    script.touch()
    line = said(command=("-c", hide.format(["run", str(script)])))
    assert "lynx run: error: training needs torch, which is not installed" in line


def test_an_untested_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_lynx.integration import versions

    assert versions.untested_note() is None
    folder = made(tmp_path / "new", 21)
    found = versions.Megatron("0.21.1", folder / "megatron" / "core", folder / "megatron" / "training")
    monkeypatch.setattr(versions, "find_megatron", lambda: found)
    note = versions.untested_note()
    assert note is not None
    assert note.startswith(
        f"megatron-core 0.21.1 in {folder} was not tested; every name that is replaced is as"
    )
