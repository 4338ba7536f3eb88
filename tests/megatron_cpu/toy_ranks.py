"""Functions that run inside ranks: a kind of layer that a test adds."""

from __future__ import annotations

from pathlib import Path

from megatron_lynx import layers
from megatron_lynx.layers.kind import LayerKind
from tests.megatron_cpu.lynx_ranks import Case, Outcome, compare
from tests.support import kinds


def add_toy_kind() -> LayerKind:
    """Let the package find the test's file as it finds its own; returns the kind that is in it."""
    folder = str(Path(kinds.__file__).parent)
    if folder not in layers.__path__:
        layers.__path__.append(folder)
        layers.KINDS.update(layers.found_kinds())  # type: ignore[attr-defined]
    return layers.KINDS["toy"]


def compare_toys(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    """``compare`` for models made of the toy kind."""
    add_toy_kind()
    return compare(rank, world_size, cases)
