"""What is shipped: versions, the changelog, the page of an index, and what operators read."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

import megatron_lynx
from megatron_lynx import cost, plan
from megatron_lynx.cli import run_files
from megatron_lynx.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
CHANGES = (ROOT / "CHANGELOG.md").read_text("utf-8")
OPERATING = (ROOT / "docs" / "operating.md").read_text("utf-8")
SETUP = runpy.run_path(str(ROOT / "setup.py"))


def test_the_changelog_begins_with_this_version_and_its_formats() -> None:
    newest = CHANGES.split("\n## ")[1]
    assert newest.splitlines()[0] == megatron_lynx.__version__ == SETUP["own_version"]()
    formats = f"Formats: plan {plan.SCHEMA}, costs {cost.SCHEMA}, report {run_files.SCHEMA}."
    assert formats in newest


def test_versions_are_ordered() -> None:
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"^## (\d+\.\d+\.\d+)$", CHANGES, re.M)]
    assert len(versions) >= 2
    assert versions == sorted(set(versions), reverse=True)


def test_an_index_page_has_no_relative_link() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    relative = re.compile(r"\]\((?!\w+://|#)")
    assert relative.search(readme)  # there is something to do
    assert not relative.search(SETUP["index_page"](readme, "", "1.2.3"))
    page = SETUP["index_page"](readme, "https://host/owner/name/", "1.2.3")
    assert not relative.search(page)
    assert "https://host/owner/name/raw/v1.2.3/docs/images/gpt-7b.png" in page


def test_the_command_says_its_version_and_what_was_tested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"lynx {megatron_lynx.__version__}")
    assert "were tested" in out


def test_every_message_that_the_troubleshooting_names_is_one() -> None:
    sources = [*(ROOT / "megatron_lynx").rglob("*.py"), *(ROOT / "scripts" / "slurm").iterdir()]
    # Messages are put together from literals: without the seams between them.
    text = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8")) for path in sources)
    table = OPERATING.split("## Troubleshooting")[1]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][2:]
    named = [one for cell in first for one in re.findall(r"`([^`]+)`", cell)]
    assert len(named) >= 10
    assert [one for one in named if one not in text] == []


def test_every_command_and_script_that_operators_read_exists() -> None:
    blocks = re.findall(r"^    (.+)$", OPERATING.replace("\\\n", " "), re.M)
    words = [shlex.split(block, comments=True) for block in blocks]
    assert len(words) >= 12
    for line in words:
        if line[0] == "lynx" and not line[1].startswith("-"):
            assert line[1] in COMMANDS
        for word in line:
            if word.startswith("scripts/"):
                assert (ROOT / word).is_file(), word
