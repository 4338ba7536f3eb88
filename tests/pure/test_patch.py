"""``lynx patch`` on small trees made from the patches' own lines: all or nothing, and back."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from megatron_lynx.cli.main import main
from megatron_lynx.cli.patch import FOLDERS, PATCHES
from megatron_lynx.cli.patch_tree import read_series

RELEASES = sorted(FOLDERS)
FILES = ("megatron/core/transformer/transformer_config.py", "megatron/training/arguments.py")


def checkout(folder: Path, release: str) -> Path:
    """A tree with the files that the patches of a release need, and the lines around them."""
    major, minor = release.split(".")
    stated = folder / "megatron" / "core" / "package_info.py"
    stated.parent.mkdir(parents=True)
    stated.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 1\nPRE_RELEASE = ''\n")
    for patch in read_series(PATCHES / FOLDERS[release]):
        path = folder / patch.path
        path.parent.mkdir(parents=True, exist_ok=True)
        hunks = [b"".join(hunk.old) for hunk in patch.hunks]
        path.write_bytes(b"# first\n" + b"# between\n".join(hunks) + b"# last, without an end of line")
    return folder


def hashes(tree: Path) -> dict[str, str]:
    """Every file below ``tree``, with its content's hash."""
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("release", RELEASES)
def test_apply_twice_and_revert_twice_restores_every_hash(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = checkout(tmp_path / "tree", release)
    before = hashes(tree)
    assert main(["patch", "check", str(tree)]) == 0
    assert "is not patched" in capsys.readouterr().out
    assert hashes(tree) == before
    assert main(["patch", "apply", str(tree)]) == 0
    patched = hashes(tree)
    count = len(read_series(PATCHES / FOLDERS[release]))
    assert sum(patched[name] != before[name] for name in before) == count == 4
    assert patched.keys() == before.keys()
    capsys.readouterr()
    assert main(["patch", "apply", str(tree)]) == 0
    assert "is patched already" in capsys.readouterr().out
    assert main(["patch", "check", str(tree)]) == 0
    assert f"is patched ({count} files)" in capsys.readouterr().out
    assert hashes(tree) == patched
    for _ in range(2):
        assert main(["patch", "revert", str(tree)]) == 0
        assert hashes(tree) == before


def test_what_is_patched_in_part_is_completed_and_reverted(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree", "0.19")
    before = hashes(tree)
    main(["patch", "apply", str(tree)])
    patched = hashes(tree)
    plain = checkout(tmp_path / "plain", "0.19")
    shutil.copy(plain / FILES[1], tree / FILES[1])
    main(["patch", "apply", str(tree)])
    assert hashes(tree) == patched
    shutil.copy(plain / FILES[1], tree / FILES[1])
    main(["patch", "revert", str(tree)])
    assert hashes(tree) == before


def test_edits_of_ones_own_survive(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree", "0.18")
    script = tree / "pretrain_gpt.py"
    main(["patch", "apply", str(tree)])
    script.write_bytes(b"# mine\n" + script.read_bytes())
    main(["patch", "revert", str(tree)])
    plain = (checkout(tmp_path / "plain", "0.18") / "pretrain_gpt.py").read_bytes()
    assert script.read_bytes() == b"# mine\n" + plain


def test_modes_and_links_stay(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree", "0.19")
    script, real = tree / "pretrain_gpt.py", tmp_path / "elsewhere.py"
    os.rename(script, real)
    script.symlink_to(real)
    real.chmod(0o755)
    main(["patch", "apply", str(tree)])
    assert script.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o755
    assert b"lynx" in real.read_bytes()


def refused(tree: Path, capsys: pytest.CaptureFixture[str], action: str = "apply") -> str:
    """Run ``lynx patch``, which must refuse in one line and change nothing; returns that line."""
    before = hashes(tree)
    assert main(["patch", action, str(tree)]) == 2
    assert hashes(tree) == before
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_a_line_that_is_gone_or_there_twice_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = checkout(tmp_path / "tree", "0.19")
    arguments = tree / FILES[1]
    text = arguments.read_bytes()
    arguments.write_bytes(text.replace(b"# Experimental yaml", b"# Something else"))
    line = refused(tree, capsys)
    assert str(arguments) in line
    assert "`# Experimental yaml`" in line
    assert "was found nowhere" in line
    arguments.write_bytes(text.replace(b"# last", text))
    assert "was found 2 times" in refused(tree, capsys)


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = checkout(tmp_path / "tree", "0.19")
    (tree / "pretrain_gpt.py").unlink()
    assert f"{tree / 'pretrain_gpt.py'} cannot be read: No such file" in refused(tree, capsys)


def test_unknown_trees_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = checkout(tmp_path / "tree", "0.19")
    stated = tree / "megatron" / "core" / "package_info.py"
    stated.write_text("MAJOR = 0\nMINOR = 15\nPATCH = 0\n")
    line = refused(tree, capsys)
    assert f"{stated} says Megatron-Core 0.15.0; there are patches for 0.17, 0.18, 0.19, 0.20" in line
    stated.write_text("VERSION = 'new'\n")
    assert f"{stated} does not say which Megatron-Core this is" in refused(tree, capsys)
    stated.unlink()
    assert f"{tree} is no Megatron-LM checkout: {stated} is missing" in refused(tree, capsys)
    assert "is no Megatron-LM checkout" in refused(tmp_path / "nowhere", capsys, "check")


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_failure_on_the_way_leaves_every_file_as_it_was(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = checkout(tmp_path / "tree", "0.19")
    if action == "revert":
        main(["patch", "apply", str(tree)])
        capsys.readouterr()
    replace, calls = os.replace, []

    def fails_once(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails_once)
    line = refused(tree, capsys, action)
    assert "yaml_arguments.py cannot be written: No space left on device; every file is as it was" in line
    assert len(calls) == 5  # two were written, and written back
