"""Training under plans is training without them, to the last bit, dropout on.

Losses, every parameter's gradient, gradient norms and weights after three optimizer steps are
compared with stock Megatron without recomputation. One launch of ranks runs many configurations.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from megatron_lynx.layers.local import backward_slots, forward_slots
from tests.megatron_cpu.lynx_ranks import EVERYTHING, Assignment, Case, Outcome, parallel_of
from tests.support.launch import run_ranks
from tests.support.small_gpt import LAYERS
from tests.support.strategies import drawn_for_layers

SOME_LAYERS: Assignment = {0: dict.fromkeys(EVERYTHING, "fwd:2:linear_fc2"), 2: {"activation": "demand"}}
"""Layers that keep everything stand between others, and open windows for them."""

NAMED: list[str | Assignment] = ["none", "selective", "full", "uniform-2", "windows", SOME_LAYERS]
SWIGLU: dict[str, Any] = {"gated_linear_unit": True, "activation": "silu", "add_bias_linear": False}
LLAMA: dict[str, Any] = {**SWIGLU, "normalization": "RMSNorm", "rope": True, "num_query_groups": 2}

MODELS: dict[int, list[dict[str, Any]]] = {
    1: [
        {},
        {"bf16": True},
        {"bias_activation_fusion": True},
        {**LLAMA, "bias_activation_fusion": True},
        {**LLAMA, "bf16": True},
        {**SWIGLU, "add_bias_linear": True},
        {"num_query_groups": 1},
        {**LLAMA, "qk_layernorm": True, "attention_output_gate": True},
        {"bf16": True, "attention_softmax_in_fp32": True, "dropout": 0.0},
    ],
    2: [
        {"tp": 2},
        {"tp": 2, **LLAMA, "bf16": True},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True, **LLAMA},
        {"tp": 2, "sequence_parallel": True, "bf16": True},
        {"pp": 2},
        {"pp": 2, "bf16": True, "normalization": "RMSNorm"},
        {"pp": 2, "vpp": 2},
    ],
    4: [
        {"tp": 2, "pp": 2},
        {"tp": 2, "pp": 2, "sequence_parallel": True, "bf16": True},
        {"tp": 2, "pp": 2, "vpp": 2},
        {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True, **LLAMA},
    ],
}
RANDOM_PLANS = {1: 2, 2: 3, 4: 3}

OPTIONS: dict[int, list[dict[str, Any]]] = {
    1: [
        {"frozen": "embedding"},
        {**LLAMA, "frozen": "linears"},
        {"frozen": "adapters"},
        {"mtp_num_layers": 2, "untied": True},
    ],
    2: [
        {"pp": 2, "vpp": 2, "frozen": "first"},
        {"tp": 2, "frozen": "linears"},
        {"tp": 2, "sequence_parallel": True, "frozen": "adapters"},
        {"tp": 2, "sequence_parallel": True, "mtp_num_layers": 1},
        {"pp": 2, "vpp": 2, "mtp_num_layers": 1},
        {"pp": 2, "lengths": "varied"},
    ],
    4: [],
}
"""What changes around the layers, or which of them train; two named plans and two drawn ones do."""


def choices_of(model: dict[str, Any]) -> list[str]:
    """Every choice that some plan for this model can make: any window of any layer."""
    parallel = parallel_of(model)
    found = ["keep", "demand", "stall", "head"]
    for layer in range(LAYERS):
        found += [f"fwd:{layer}:{slot}" for slot in forward_slots(parallel)]
        found += [f"bwd:{layer}:{slot}" for slot in backward_slots(parallel)]
    return found


def drawn_plans(model: dict[str, Any], count: int) -> list[Assignment]:
    """Plans that assign any region of any layer to any window, drawn by Hypothesis.

    No order is respected: a region's inputs may come later, in another window, or never. What a
    window cannot do is left to the rebuild on demand, and the result must not change.
    """
    choice = st.sampled_from(choices_of(model))
    layer = st.fixed_dictionaries(dict.fromkeys(EVERYTHING, choice))

    return drawn_for_layers(layer, LAYERS, count)


def drawn_beginnings(count: int) -> list[Assignment]:
    """Plans under which the layers' first parts, more or fewer in each, run again as one (``program.Span``):
    they are dropped on demand, of the others some. The input of a layer may be dropped too."""
    drawn: list[Assignment] = []
    later = st.fixed_dictionaries(dict.fromkeys(EVERYTHING, st.sampled_from(["keep", "demand"])))
    layer = st.tuples(st.integers(0, len(EVERYTHING)), later, st.booleans())

    for plan in drawn_for_layers(layer, LAYERS, count):
        made: Assignment = {}
        for index, (length, rest, with_input) in plan.items():
            above = {"input": "demand"} if with_input and index % 2 else {}
            made[index] = {**above, **rest, **dict.fromkeys(EVERYTHING[:length], "demand")}
        drawn.append(made)
    return drawn


def cases(world_size: int) -> list[Case]:
    """Every model with the named plans and some drawn ones."""
    count = RANDOM_PLANS[world_size]
    return [
        *(
            Case(model, [*NAMED, *drawn_plans(model, count), *drawn_beginnings(count - 1)])
            for model in MODELS[world_size]
        ),
        *with_options(OPTIONS[world_size]),
    ]


def with_options(models: list[dict[str, Any]]) -> list[Case]:
    """Cases of few plans each."""
    return [Case(model, ["full", "windows", *drawn_plans(model, 2)]) for model in models]


def check_outcomes(asked: list[Case], results: list[list[Outcome]]) -> None:
    """Every plan of every case ran on every rank, differs in no bit, and left nothing."""
    expected = sum(len(case.plans) for case in asked)
    for rank, outcomes in enumerate(results):
        assert len(outcomes) == expected
        wrong = [f"rank {rank}: {o.case}: {o.different[:3]}" for o in outcomes if o.different]
        assert not wrong, "\n".join(wrong)
        assert not [o.case for o in outcomes if o.left_bytes], "a tape held storages after a step"
        # The steps are those of the schedule; what is unknown is said (adapters in linears).
        strange = [o for o in outcomes if any("LoRALinear" not in text for text in o.warned)]
        assert not [(o.case, o.warned) for o in strange]
        assert any(outcome.rebuilt for outcome in outcomes)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_to_the_last_bit(world_size: int) -> None:
    asked = cases(world_size)
    results = run_ranks(world_size, "tests.megatron_cpu.lynx_ranks:compare", asked, timeout_s=570)
    check_outcomes(asked, results)
    _check_work(results, world_size)


def _check_work(results: list[list[Outcome]], world_size: int) -> None:
    """The comparison means something only if plans were carried out: count what was rebuilt where."""
    places = {place for outcomes in results for o in outcomes for place, n in o.rebuilt.items() if n}
    expected = {
        1: {"demand"},
        2: {"demand", "bwd", "head", "stall"},
        4: {"demand", "bwd", "head", "stall", "fwd"},
    }
    assert places == expected[world_size]
    for outcome in results[0]:
        if outcome.case.endswith(" none"):
            assert not outcome.rebuilt
        elif outcome.case.endswith((" full", " selective", " uniform-2")):
            assert set(outcome.rebuilt) == {"demand"}
