"""Plans: text and JSON round-trip, what is malformed is refused, the fingerprint follows the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.errors import PlanError
from megatron_lynx.layers.local import FORWARD_ORDER, layer_graph
from megatron_lynx.plan import (
    Choice,
    LayerPlan,
    Plan,
    StagePlan,
    Window,
    fingerprint,
    parse_choice,
    parse_plan,
)
from megatron_lynx.spec import Batch, Model, Parallel

SLOTS = ("linear_qkv", "linear_proj", "linear_fc1.gather", "linear_fc2")

windows = st.one_of(
    st.builds(Window, st.sampled_from(["fwd", "bwd"]), st.integers(0, 99), st.sampled_from(SLOTS)),
    st.sampled_from([Window("head"), Window("stall")]),
)
choices = st.one_of(windows, st.just("demand"))


@st.composite
def layer_plans(draw: st.DrawFn, layer: int) -> LayerPlan:
    regions = sorted(draw(st.sets(st.sampled_from(FORWARD_ORDER))), key=FORWARD_ORDER.index)
    return LayerPlan(layer=layer, choices=tuple((region, draw(choices)) for region in regions))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pp, vpp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    counts = [draw(st.integers(0, 3)) for _ in range(pp * vpp)]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    stages = []
    for stage in range(pp):
        held = range(stage, pp * vpp, pp)
        chunks = tuple(tuple(range(starts[v], starts[v] + counts[v])) for v in held)
        layers = tuple(draw(layer_plans(k)) for chunk in chunks for k in chunk)
        stages.append(StagePlan(stage=stage, chunks=chunks, layers=layers))
    return Plan(
        planner=draw(st.sampled_from(["opt", "heu", "full-block-3"])),
        fingerprint="0123456789abcdef",
        job=draw(st.sampled_from([{}, {"seq_length": 64, "swiglu": True, "attention": "flash"}])),
        layout=draw(st.sampled_from([None, "Et*2|t*2L", "E|(t|)*3L"])),
        stages=tuple(stages),
    )


@given(plans())
def test_text_and_json_round_trip(plan: Plan) -> None:
    assert parse_plan(str(plan)) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert parse_plan(plan.to_json()) == plan


@given(st.one_of(choices, st.just("keep")))
def test_choices_round_trip(choice: Choice) -> None:
    assert parse_choice(str(choice)) == choice


@pytest.mark.parametrize("text", ["", "fwd:3", "sideways:1:x", "bwd:-1:linear_fc1", "stall:2", "DEMAND"])
def test_what_is_no_choice_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not keep, demand or a window"):
        parse_choice(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "lynx-plan 99 opt abc\nstage 0 chunks 0\n  layer 0: keep\n",
        "lynx-plan 2 opt abc\nlayer 0: keep\n",
        "lynx-plan 2 opt abc\nstage 0 chunks 0\n  layer 1: keep\n",
        "lynx-plan 2 opt abc\nstage 0 chunks 0\n  layer 0: input_layernorm=later\n",
        "lynx-plan 2 opt abc\nstage 0 chunks 0\n  layer 0: input_layernorm\n",
        "lynx-plan 2 opt abc\nnonsense\n",
        "{}",
        "{",
        '{"schema": 3}',
        '{"schema": 2, "stages": 3}',
        "lynx-plan 2 opt abc\njob hidden_size\nstage 0 chunks 0\n  layer 0: keep\n",
        "lynx-plan 2 opt abc\njob hidden_size=wide\nstage 0 chunks 0\n  layer 0: keep\n",
    ],
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_plan(text)


def test_windows_list_what_is_due_last_layer_first() -> None:
    stall = Window("stall")
    layers = tuple(
        LayerPlan(layer=k, choices=(("input_layernorm", stall), ("activation", stall))) for k in (4, 5)
    )
    stage = StagePlan(stage=1, chunks=((4, 5),), layers=layers)
    regions = ("input_layernorm", "activation")
    assert stage.windows() == {stall: tuple((k, region) for k in (5, 4) for region in regions)}
    assert stage.layer(5).dropped == frozenset(regions)
    assert stage.layer(4).choice("linear_qkv") == "keep"
    with pytest.raises(KeyError):
        stage.layer(3)


def test_the_fingerprint_follows_what_changes_a_layer() -> None:
    model = Model(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=128)
    parallel, batch = Parallel(tp=2), Batch(seq_length=8, micro_batch_size=1, global_batch_size=4)

    def of(model: Model, parallel: Parallel, batch: Batch) -> str:
        return fingerprint(model, parallel, batch, layer_graph(model, parallel, batch))

    own = of(model, parallel, batch)
    assert own == of(replace(model, name="x"), replace(parallel, dp=2), replace(batch, global_batch_size=8))
    resolved = replace(
        model, num_query_groups=4, kv_channels=16, ffn_hidden_size=256, hidden_dropout=0.2, vocab_size=256
    )
    assert own == of(replace(resolved, max_position_embeddings=64), parallel, batch)
    interleaved = Parallel(pp=2, vpp=2)
    grouped = replace(interleaved, microbatch_group_size=2)
    assert of(model, interleaved, batch) == of(model, grouped, batch)
    others = [
        of(replace(model, num_layers=8), parallel, batch),
        of(model, replace(parallel, pp=2), batch),
        of(model, parallel, replace(batch, micro_batch_size=2)),
        of(replace(model, hidden_dropout=0.0), parallel, batch),
    ]
    assert own not in others
    assert len(set(others)) == len(others)
