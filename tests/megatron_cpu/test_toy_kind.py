"""A kind of layer is one file: a toy kind that only the tests have is planned for and trained.

``tests/support/kinds/toy.py`` is all that there is of it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.megatron_cpu.lynx_ranks import Assignment, Case, parallel_of
from tests.megatron_cpu.test_bitwise import check_outcomes
from tests.support.kinds.toy import KIND, toy_spec
from tests.support.launch import run_ranks
from tests.support.small_gpt import LAYERS
from tests.support.strategies import drawn_for_layers

DROPPABLE = ("norm", "linear", "dropout", "residual")
MODELS: list[dict[str, Any]] = [
    {"spec": toy_spec, "tp": 2},
    {"spec": toy_spec, "tp": 2, "bf16": True},
    {"spec": toy_spec, "pp": 2},
]


def random_plans(model: dict[str, Any], count: int) -> list[Assignment]:
    """Plans that give any part of any layer, its input too, any place that this model has."""
    slots = KIND.forward_slots(parallel_of(model))
    windows = [
        f"{kind}:{layer}:{slot}" for kind in ("fwd", "bwd") for layer in range(LAYERS) for slot in slots
    ]
    choices = st.sampled_from(["keep", "demand", "demand", "stall", "head", *windows])
    layer = st.fixed_dictionaries(dict.fromkeys(DROPPABLE, choices))

    return drawn_for_layers(layer, LAYERS, count)


def test_trains_bit_for_bit_under_random_plans() -> None:
    everything: Assignment = {layer: dict.fromkeys(DROPPABLE[:3], "demand") for layer in range(LAYERS)}
    cases = [Case(model, ["none", everything, *random_plans(model, 6)]) for model in MODELS]
    results = run_ranks(2, "tests.megatron_cpu.toy_ranks:compare_toys", cases)
    check_outcomes(cases, results)
    for first in range(0, len(results[0]), len(cases[0].plans)):
        assert not results[0][first].rebuilt
        assert results[0][first + 1].rebuilt["demand"]
