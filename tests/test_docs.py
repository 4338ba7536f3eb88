"""The README tells the truth about what is in the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lynx.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_every_path_that_the_readme_names_exists() -> None:
    linked = set(re.findall(r"\]\(([^):]+)\)", README))
    quoted = set(re.findall(r"(?:megatron_lynx|scripts|tests|docs|patches)/[\w./-]*\w", README))
    assert len(linked) >= 5
    missing = [path for path in linked | quoted if not (ROOT / path).exists()]
    assert missing == []


def test_the_tour_has_at_most_eight_files() -> None:
    tour = re.findall(r"^\d\. `(\S+)`", README, re.MULTILINE)
    assert 0 < len(tour) <= 8


def test_every_command_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`?\blynx ([a-z]+)[ `]", README)) & {"plan", "compare", "explain", "simulate"}
    assert named == {"plan", "compare", "explain", "simulate"}
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--lynx-[a-z]+", README))))
def test_every_flag_that_the_readme_names_exists(flag: str) -> None:
    assert flag in (ROOT / "megatron_lynx" / "integration" / "arguments.py").read_text()


def test_markdown_pages_link_to_files_that_exist() -> None:
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "patches" / "README.md"):
        for target in re.findall(r"\]\(([^):#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
