"""Costs: windows, roofline estimates against published figures, static memory, cost tables."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.errors import ConfigError
from megatron_lynx.estimate import estimate_costs, padded_vocabulary
from megatron_lynx.footprint import (
    Footprint,
    footprint,
    phase_workspaces,
    stage_parameters,
    step_ns,
    total_parameters,
)
from megatron_lynx.graph import LayerGraph
from megatron_lynx.layers import kind_of, layer_graph
from megatron_lynx.layers.local import KIND, backward_slots, forward_slots
from megatron_lynx.plan import Window
from megatron_lynx.presets import load_cluster, load_model, preset_names
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel
from tests.support.toy import toy_graph

TOY, A100 = load_cluster("toy"), load_cluster("a100-80g-nvlink")
COSTS = LayerCosts(
    forward_ns={"linear_qkv": 100, "linear_fc1": 200},
    dgrad_ns={"linear_qkv": 110, "linear_fc1": 210},
    wgrad_ns={"linear_qkv": 90, "linear_fc1": 190},
    collective_ns={
        "fwd:linear_proj": 300,
        "bwd:linear_fc1": 300,
        "bwd:linear_qkv": 50,
        "bwd:linear_fc2": 40,
    },
    beside=("linear_fc1", "linear_qkv"),
    contention=1.5,
)
SEQUENCE = replace(
    COSTS,
    collective_ns={
        "bwd:linear_proj": 40,
        "bwd:linear_fc1.gather": 350,
        "bwd:linear_fc1.scatter": 250,
        "bwd:linear_qkv.gather": 100,
        "bwd:linear_qkv.scatter": 150,
    },
)


@pytest.mark.parametrize(
    ("costs", "window", "length", "slowed_by", "uncontended"),
    [
        (COSTS, Window("fwd", 0, "linear_proj"), 300, 0, 300),
        (COSTS, Window("fwd", 0, "linear_fc2"), 0, 0, 0),
        (COSTS, Window("bwd", 0, "linear_fc2"), 40, 0, 40),
        (COSTS, Window("bwd", 0, "linear_fc1"), 300 - 285, 285 - 190, 300 - 190),
        (COSTS, Window("bwd", 0, "linear_qkv"), 0, 17, 0),  # 33.3 of 90 done in 50: 50 / 3 more
        (SEQUENCE, Window("bwd", 0, "linear_proj"), 40, 0, 40),
        (SEQUENCE, Window("bwd", 0, "linear_fc1.gather"), 350 - 315, 315 - 210, 350 - 210),
        (SEQUENCE, Window("bwd", 0, "linear_fc1.scatter"), 0, 84, 250 - 190),  # 250 / 3
        (SEQUENCE, Window("bwd", 0, "linear_qkv.gather"), 0, 34, 0),  # 100 / 3
        (SEQUENCE, Window("bwd", 0, "linear_qkv.scatter"), 150 - 135, 135 - 90, 150 - 90),
    ],
)
def test_a_window_is_what_megatron_leaves_of_a_wait(
    costs: LayerCosts, window: Window, length: int, slowed_by: int, uncontended: int
) -> None:
    """With contention 1.5: one and a half times the GEMM beside it, if that is shorter than the wait."""
    alone = replace(costs, contention=1.0)
    assert (costs.window_ns(window), alone.window_ns(window)) == (length, uncontended)
    if window.kind == "bwd":
        assert (costs.slowed_by_ns(window.slot), alone.slowed_by_ns(window.slot)) == (slowed_by, 0)


def test_which_gemm_runs_beside_which_collective() -> None:
    """The two linears that are split by row have none: their gather comes before any work."""
    plain, sequence = (Parallel(tp=2, sequence_parallel=sp) for sp in (False, True))
    assert {slot: COSTS.gemm_beside(slot) for slot in backward_slots(plain)} == {
        "linear_fc1": "wgrad",
        "linear_qkv": "wgrad",
    }
    assert {slot: COSTS.gemm_beside(slot) for slot in backward_slots(sequence)} == {
        "linear_fc2": "",
        "linear_fc1.gather": "dgrad",
        "linear_fc1.scatter": "wgrad",
        "linear_proj": "",
        "linear_qkv.gather": "dgrad",
        "linear_qkv.scatter": "wgrad",
    }


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(1.0, 3.0))
def test_work_beside_a_collective(work: int, wire: int, contention: float) -> None:
    """min(c g, g + w (1 - 1/c)) for the work, max(w, g + w (1 - 1/c)) for both, to a nanosecond or two."""
    beside, after, idle = replace(COSTS, contention=contention).overlap(work, wire)
    slowed = work + wire * (1 - 1 / contention)
    assert beside + after == pytest.approx(min(contention * work, slowed), abs=2)
    assert beside + after + idle == pytest.approx(max(wire, slowed), abs=2)
    assert beside + idle == wire
    assert after == 0 or idle == 0
    assert beside + after >= work
    assert COSTS.overlap(work, 0) == (0, work, 0)
    plain = replace(COSTS, contention=1.0).overlap(work, wire)
    assert plain == (min(work, wire), max(0, work - wire), max(0, wire - work))


def test_hidden_work_takes_longer() -> None:
    assert COSTS.rebuild_ns("linear_qkv", hidden=False) == 100
    assert COSTS.rebuild_ns("linear_qkv", hidden=True) == 150
    assert COSTS.rebuild_ns("unknown", hidden=True) == 0
    assert COSTS.layer_forward_ns == 100 + 200 + 300
    compute = 110 + 210 + 90 + 190
    assert COSTS.layer_backward_ns == compute + (300 - 190) + 17 + 40
    assert SEQUENCE.layer_backward_ns == compute + 40 + (350 - 210) + 84 + 34 + (150 - 90)
    assert replace(COSTS, contention=1.0).layer_backward_ns == compute + (300 - 190) + 0 + 40


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_arxiv_2205_05198_table_4(sequence_parallel: bool) -> None:
    """One layer of the 22B model on 8 A100-80G: forward 7.7 ms, backward 11.9 ms, 19.0 ms in all
    with sequence parallelism; full recomputation 27.2 ms, selective 20.9 ms, 20.3 ms with SP."""
    table = estimate_costs(
        load_model("gpt-22b", attention="unfused"),
        Parallel(tp=8, sequence_parallel=sequence_parallel),
        Batch(seq_length=2048, micro_batch_size=4, global_batch_size=4),
        A100,
    )
    forward, backward = table.layer.layer_forward_ns / 1e6, table.layer.layer_backward_ns / 1e6
    selective = forward + backward + table.layer.forward_ns["core_attention"] / 1e6
    if sequence_parallel:
        assert forward + backward == pytest.approx(19.0, rel=0.05)
        assert selective == pytest.approx(20.3, rel=0.05)
    else:
        assert forward == pytest.approx(7.7, rel=0.05)
        assert backward == pytest.approx(11.9, rel=0.05)
        assert 2 * forward + backward == pytest.approx(27.2, rel=0.05)
        assert selective == pytest.approx(20.9, rel=0.05)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_flops_of_a_layer(tp: int, attention: str) -> None:
    """24bsh^2(1 + s/6h)/t forward, half of the attention term with a causal flash kernel; the
    GEMMs of the backward are twice those of the forward."""
    model = load_model("gpt-1.3b", attention=attention)
    s, b, h = 1024, 2, 2048
    job = (model, Parallel(tp=tp), Batch(seq_length=s, micro_batch_size=b, global_batch_size=b))
    work = kind_of(model).work(*job)
    forward = sum(k.flops for kernels in work.forward.values() for k in kernels)
    gemms, scores = 24 * b * s * h * h // tp, 4 * b * s * s * h // tp
    assert forward == gemms + (scores // 2 if attention == "flash" else scores)
    weights = sum(k.flops for kernels in work.wgrad.values() for k in kernels)
    inputs = sum(k.flops for name, ks in work.dgrad.items() for k in ks if name.startswith("linear"))
    assert weights == inputs == gemms


@pytest.mark.parametrize("name", preset_names("models"))
@pytest.mark.parametrize(
    "parallel", [Parallel(tp=1), Parallel(tp=4), Parallel(tp=4, sequence_parallel=True, pp=4)]
)
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_every_region_and_wait_has_a_time(name: str, parallel: Parallel, attention: str) -> None:
    model = load_model(name, attention=attention)
    batch = Batch(seq_length=1024, micro_batch_size=1, global_batch_size=8)
    table, graph = estimate_costs(model, parallel, batch, A100), layer_graph(model, parallel, batch)
    names = set(graph.names) - {"input"}
    assert set(table.layer.forward_ns) == names
    assert set(table.layer.dgrad_ns) == names
    assert set(table.layer.wgrad_ns) == {n for n in names if n.startswith("linear")}
    waits = {f"fwd:{s}" for s in forward_slots(parallel)} | {f"bwd:{s}" for s in backward_slots(parallel)}
    assert set(table.layer.collective_ns) == waits
    free = {"qkv_split"}
    assert all(time > 0 for region, time in table.layer.forward_ns.items() if region not in free)
    assert (table.p2p_ns > 0) == (parallel.pp > 1)
    assert min(table.head_backward_ns, table.head_forward_ns, table.embedding_forward_ns) > 0
    assert table.graph == graph.fingerprint()


def test_collectives_by_hand() -> None:
    """An all-reduce of s x b x h in bf16 on the toy cluster: 2(t-1)/t of it at 100 GB/s."""
    model = load_model("gpt-1.3b")
    batch = Batch(seq_length=1000, micro_batch_size=1, global_batch_size=1)
    table = estimate_costs(model, Parallel(tp=4), batch, TOY)
    assert set(table.layer.collective_ns.values()) == {61_440}  # 1000 * 2048 * 2 B * 1.5 / 100 GB/s


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("bandwidth", [100, 400, 1600])
def test_the_heads_gemms_are_slowed_beside_its_collectives(sequence_parallel: bool, bandwidth: int) -> None:
    """The toy device and a link that slows compute by half: the window shrinks, or is gone."""
    model, parallel = load_model("gpt-1.3b"), Parallel(tp=4, sequence_parallel=sequence_parallel)
    batch = Batch(seq_length=1000, micro_batch_size=1, global_batch_size=1)
    node = replace(TOY.node, bytes_per_second=bandwidth * 10**7)
    plain = estimate_costs(model, parallel, batch, replace(TOY, node=node))
    slow = estimate_costs(model, parallel, batch, replace(TOY, node=replace(node, contention=1.5)))
    wire = plain.layer.collective_ns["bwd:linear_fc1.scatter" if sequence_parallel else "bwd:linear_fc1"]
    vocabulary, h, s = padded_vocabulary(model, parallel) // 4, 2048, 1000
    dgrad = TOY.device.compute_ns(2 * s * h * vocabulary, 2 * (s * h + h * vocabulary + s * vocabulary))
    wgrad = TOY.device.compute_ns(2 * s * h * vocabulary, 2 * s * (h + vocabulary) + 8 * h * vocabulary)
    assert plain.head_window_ns == max(0, wire - wgrad)
    assert slow.head_window_ns == max(0, wire - round(1.5 * wgrad))
    pairs = [wgrad, dgrad] if sequence_parallel else [wgrad]
    more = [max(wire, gemm + wire / 3) - max(wire, gemm) for gemm in pairs]
    assert slow.head_backward_ns - plain.head_backward_ns == pytest.approx(sum(more), abs=len(pairs))
    assert slow.head_forward_ns == plain.head_forward_ns


@given(st.integers(0, 10**12), st.integers(0, 10**9), st.floats(1.0, 3.0))
def test_a_table_round_trips(time_ns: int, other_ns: int, contention: float) -> None:
    layer = LayerCosts(
        forward_ns={"a": time_ns},
        dgrad_ns={"a": other_ns},
        wgrad_ns={},
        collective_ns={"fwd:a": time_ns},
        beside=("a",),
        contention=contention,
    )
    table = CostTable(layer=layer, p2p_ns=other_ns, head_window_ns=time_ns, graph="abc", source="test")
    assert CostTable.from_json(table.to_json()) == table


def broken(**changes: Any) -> str:
    data = json.loads(CostTable(layer=COSTS, graph="abc").to_json())
    for key, value in changes.items():
        if value is None:
            del data[key]
        else:
            data[key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        broken(schema=1),
        broken(p2p_ns=None),
        broken(p2p_ns=1.5),
        broken(p2p_ns=-1),
        broken(head_forward_ns="3"),
        broken(layer={"forward_ns": {"a": True}, "dgrad_ns": {}, "wgrad_ns": {}, "collective_ns": {}}),
        broken(layer=3),
    ],
)
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--profile costs\.json"):
        CostTable.from_json(text, "--profile costs.json")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-1.3b", 1.32),
        ("gpt-2.7b", 2.65),
        ("gpt-4.7b", 5.05),
        ("gpt-7b", 6.66),
        ("gpt-13b", 12.86),
        ("gpt-20b", 20.26),
        ("gpt-22b", 22.07),
        ("gpt-23b", 22.98),
        ("llama-7b", 6.74),
        ("llama-13b", 13.02),
        ("llama-70b", 68.98),
        ("llama3-8b", 8.03),
    ],
)
def test_parameters_of_the_presets(name: str, billions: float) -> None:
    assert round(total_parameters(load_model(name)) / 1e9, 2) == billions


def test_parameters_by_formula() -> None:
    """12h^2 + 13h for a layer of GPT."""
    assert KIND.parameters(load_model("gpt-7b"), 1) == 12 * 4096**2 + 13 * 4096


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.booleans())
def test_stages_hold_the_whole_model(tp: int, pp: int, llama: bool) -> None:
    """Over all stages the matrices add up; tied embeddings exist twice if the stages differ."""
    model = load_model("llama-7b" if llama else "gpt-1.3b")
    parallel = Parallel(tp=tp, pp=pp)
    layers = model.num_layers // pp
    held = sum(stage_parameters(model, parallel, layers, first=i == 0, last=i == pp - 1) for i in range(pp))
    alone = stage_parameters(model, Parallel(tp=tp), model.num_layers, first=True, last=True)
    copy = padded_vocabulary(model, parallel) // tp * model.hidden_size if pp > 1 and not llama else 0
    assert held == alone + copy


def _of_parameters(found: Footprint) -> int:
    return found.weights_bytes + found.gradients_bytes + found.main_params_bytes + found.optimizer_bytes


def test_static_memory_by_hand() -> None:
    """18 bytes a parameter; 6 + 12/DP with the distributed optimizer; logits, and a copy in fp32."""
    model, batch = load_model("gpt-1.3b"), Batch(seq_length=2048, micro_batch_size=1, global_batch_size=8)
    plain = footprint(model, Parallel(pp=2, dp=4), batch, stage=0, layers=12, in_flight=2)
    count = plain.parameters
    assert _of_parameters(plain) == 18 * count
    split = Optimizer(use_distributed_optimizer=True)
    shared = footprint(model, Parallel(pp=2, dp=4), batch, stage=0, layers=12, in_flight=2, optimizer=split)
    assert 9 * count <= _of_parameters(shared) <= 9 * count + 9 * 4 * 128
    assert plain.moments.head_bytes == 0
    assert plain.embedding_bytes == 2 * (2048 * 2048 + 16 * 2048)
    last = footprint(model, Parallel(pp=2), batch, stage=1, layers=12, in_flight=1)
    assert last.embedding_bytes == 0
    assert last.moments.head_bytes == 2048 * 51200 * 6 + 4 * 8 * 2048 + 2 * 2048 * 2048 * 2
    assert last.moments.embedding_bytes == 0
    assert last.static_bytes == sum(size for _, size in last.owners())


def test_fp32_has_no_second_copy_of_the_weights() -> None:
    model = load_model("gpt-1.3b", dtype_bytes=4)
    batch = Batch(seq_length=128, micro_batch_size=1, global_batch_size=1)
    one = footprint(model, Parallel(), batch, stage=0, layers=24, in_flight=1)
    assert _of_parameters(one) == 16 * one.parameters


def test_layers_of_multi_token_prediction_are_the_last_stages() -> None:
    """A layer each, with a projection of two rows and three norms; what they keep is the head's."""
    model, batch = load_model("gpt-1.3b"), Batch(seq_length=2048, micro_batch_size=1, global_batch_size=8)
    more, parallel, h = replace(model, mtp_num_layers=2), Parallel(pp=2), model.hidden_size
    plain, found = (
        [footprint(one, parallel, batch, stage=s, layers=12, in_flight=2 - s) for s in (0, 1)]
        for one in (model, more)
    )
    assert found[0] == plain[0]
    own = kind_of(model).parameters(model, 1) + 2 * h * h + 3 * 2 * h
    assert found[1].parameters - plain[1].parameters == 2 * own + h * (model.max_position_embeddings or 0)
    costs, with_them = (estimate_costs(one, parallel, batch, load_cluster("toy")) for one in (model, more))
    assert with_them.layer == costs.layer
    layer, head = costs.layer.layer_forward_ns, costs.head_forward_ns
    assert with_them.head_forward_ns > 3 * head + 2 * layer
    kept = layer_graph(model, parallel, batch).kept_bytes() + 2048 * 51200 * 4
    assert found[1].moments.head_bytes - plain[1].moments.head_bytes > 2 * kept


def test_what_does_not_train_is_weights_alone() -> None:
    """2 bytes a frozen parameter; a real model's count replaces the description's."""
    model, batch = load_model("gpt-1.3b"), Batch(seq_length=2048, micro_batch_size=1, global_batch_size=8)
    for optimizer in (Optimizer(), Optimizer(use_distributed_optimizer=True)):
        found = footprint(
            model,
            Parallel(pp=2, dp=4),
            batch,
            stage=0,
            layers=12,
            in_flight=2,
            optimizer=optimizer,
            counted=(10_240_000, 512_000),
        )
        shared = 6 + 12 // 4 if optimizer.use_distributed_optimizer else 18
        assert found.parameters == 10_240_000
        assert _of_parameters(found) == 2 * (10_240_000 - 512_000) + shared * 512_000


def test_the_vocabulary_is_padded_as_megatron_pads() -> None:
    model = Model(num_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=50257)
    assert padded_vocabulary(model, Parallel()) == 50304
    assert padded_vocabulary(model, Parallel(tp=8)) == 51200


def test_a_step_reduces_gradients_and_runs_adam() -> None:
    """10^9 parameters on the toy cluster: 12 bytes each for the norm and 30 for Adam at 1 TB/s, gradients by
    the node link."""
    model, split = load_model("gpt-1.3b"), Optimizer(use_distributed_optimizer=True)
    alone = step_ns(10**9, model, Parallel(), TOY, Optimizer())
    assert alone == 42 * 10**6
    pair = step_ns(10**9, model, Parallel(dp=2), TOY, Optimizer())
    assert pair == 42 * 10**6 + 40 * 10**6  # 4 GB * 2 * 1/2 at 100 GB/s
    shared = step_ns(10**9, model, Parallel(dp=2), TOY, split)
    assert shared == 21 * 10**6 + 20 * 10**6 + 10 * 10**6
    hidden = replace(split, overlap_grad_reduce=True, overlap_param_gather=True)
    times = {"forward_ns": 4 * 10**6, "backward_ns": 10**9}
    overlapped = step_ns(10**9, model, Parallel(dp=2), TOY, hidden, **times)
    assert overlapped == 21 * 10**6 + 20 * 10**6 // 25 + 6 * 10**6  # one of 25 buckets; a short forward


def test_workspaces_use_what_a_phase_has_let_go() -> None:
    graph = toy_graph()
    assert phase_workspaces(graph, {"mlp": 7, "attn": 50, "norm": 3}) == (50 - 10 - 5 - 10,)
    cut = LayerGraph(regions=graph.regions, storages=graph.storages, cuts=("attn",))
    # mlp, add and proj run before the cut: attention begins with nothing of its own gone
    assert phase_workspaces(cut, {"mlp": 7, "attn": 50, "norm": 3}) == (7, 50)
    # ... and the norm has attention's 40 bytes and the GEMM's 10 to use
    assert phase_workspaces(cut, {"norm": 60}) == (0, 60 - 40 - 10)


def test_a_table_with_other_times() -> None:
    table = CostTable(layer=COSTS, p2p_ns=4, head_window_ns=6, workspace_bytes=(1, 2))
    assert table.with_times({"p2p_ns": 9}).p2p_ns == 9
    assert table.with_times({"p2p_ns": 9}).head_window_ns == 6
    with pytest.raises(KeyError):
        table.with_times({"graph": 1})
    slower = replace(COSTS, forward_ns={"linear_qkv": 200, "linear_fc1": 201}, contention=2.5)
    other = CostTable(layer=slower, p2p_ns=8, workspace_bytes=(5, 5))
    middle = CostTable.median([table, other])
    assert middle.layer.forward_ns == {"linear_qkv": 150, "linear_fc1": 200}
    assert (middle.layer.contention, middle.p2p_ns, middle.head_window_ns) == (2.0, 6, 3)
    assert middle.workspace_bytes == (1, 2)
    assert CostTable.from_json(middle.to_json()) == middle
    assert CostTable.median([table, other, other]).layer == other.layer


@pytest.mark.parametrize("sizes", ["[1.5]", '["1"]', "[-1]", "[true]"])
def test_workspaces_are_whole_bytes(sizes: str) -> None:
    text = CostTable(layer=COSTS, workspace_bytes=(77,)).to_json().replace("[\n  77\n ]", sizes)
    assert sizes in text
    with pytest.raises(ConfigError, match="workspace_bytes"):
        CostTable.from_json(text)
