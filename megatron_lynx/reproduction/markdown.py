"""Pieces of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

WIDTH = 100


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def prose(*sentences: str) -> str:
    """A paragraph of sentences, wrapped."""
    return fill(" ".join(sentences), WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def bullets(*items: str) -> str:
    """A list, wrapped."""
    lines = (
        fill(f"- {item}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for item in items
    )
    return "\n".join(lines) + "\n"
