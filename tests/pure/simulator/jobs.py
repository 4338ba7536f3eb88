"""Jobs for the simulator's tests: a toy layer with round numbers, GPT layers, random plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.layers.local import KIND, backward_slots, forward_slots, layer_graph
from megatron_lynx.plan import Choice, LayerPlan, StagePlan, Window, parse_choice
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.schedule import turns
from megatron_lynx.simulator.engine import SimJob
from megatron_lynx.spec import Batch, Model, Parallel

MODEL = Model(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=128)
BATCH = Batch(seq_length=16, micro_batch_size=1, global_batch_size=8)

FORWARD = {
    "input_layernorm": 2,
    "linear_qkv": 30,
    "core_attention": 20,
    "linear_proj": 10,
    "self_attn_dropout": 1,
    "self_attn_bda": 2,
    "pre_mlp_layernorm": 2,
    "linear_fc1": 40,
    "activation": 5,
    "linear_fc2": 40,
    "mlp_dropout": 1,
    "mlp_bda": 2,
}
WGRAD = {"linear_qkv": 30, "linear_proj": 10, "linear_fc1": 40, "linear_fc2": 40}


def graph_of(parallel: Parallel) -> LayerGraph:
    """The graph of a small GPT layer."""
    return layer_graph(MODEL, parallel, BATCH)


def table_of(
    parallel: Parallel,
    *,
    wait: int = 50,
    contention: float = 1.0,
    p2p: int = 0,
    ends: bool = True,
) -> CostTable:
    """Round times: a layer's forward is 155 and its collectives; each collective takes ``wait``."""
    slots = [f"fwd:{slot}" for slot in forward_slots(parallel)]
    slots += [f"bwd:{slot}" for slot in backward_slots(parallel)]
    layer = LayerCosts(
        forward_ns=FORWARD,
        dgrad_ns=dict(FORWARD),
        wgrad_ns=WGRAD,
        collective_ns=dict.fromkeys(slots, wait),
        beside=tuple(KIND.beside),
        contention=contention,
    )
    if not ends:
        return CostTable(layer=layer, p2p_ns=p2p)
    return CostTable(
        layer=layer,
        p2p_ns=p2p,
        embedding_forward_ns=7,
        embedding_backward_ns=9,
        head_forward_ns=60,
        head_backward_ns=120,
        head_window_ns=20 if parallel.tp > 1 else 0,
    )


def chunks_of(counts: Sequence[int], pp: int, stage: int) -> tuple[tuple[int, ...], ...]:
    """Global layers of a rank, when virtual stages hold ``counts``."""
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return tuple(tuple(range(starts[i], starts[i + 1])) for i in range(stage, len(counts), pp))


def stage_plan(stage: int, chunks: tuple[tuple[int, ...], ...], choices: Mapping[str, str]) -> StagePlan:
    """One policy for all layers; ``K`` in a window stands for the layer itself."""
    layers = []
    for layer in (layer for chunk in chunks for layer in chunk):
        made = tuple((name, parse_choice(text.replace("K", str(layer)))) for name, text in choices.items())
        layers.append(LayerPlan(layer=layer, choices=made))
    return StagePlan(stage=stage, chunks=chunks, layers=tuple(layers))


def job_of(
    parallel: Parallel,
    microbatches: int,
    choices: Mapping[str, str] | None = None,
    *,
    counts: Sequence[int] | None = None,
    table: CostTable | None = None,
    workspace: tuple[int, ...] = (),
) -> SimJob:
    """A job with one policy for all layers, two layers in each virtual stage unless told."""
    counts = counts or [2] * (parallel.pp * parallel.vpp)
    return SimJob(
        stages=tuple(
            stage_plan(stage, chunks_of(counts, parallel.pp, stage), choices or {})
            for stage in range(parallel.pp)
        ),
        graph=graph_of(parallel),
        table=table or table_of(parallel),
        parallel=parallel,
        microbatches=microbatches,
        workspace_bytes=workspace,
    )


def problem_of(job: SimJob, stage: int, stall_ns: int = 0, budget_bytes: int = 1 << 60) -> StageProblem:
    """The planner's view of one rank of a job."""
    parallel = job.parallel
    assert isinstance(job.graph, LayerGraph)
    return StageProblem(
        stage=stage,
        chunks=job.stages[stage].chunks,
        graph=job.graph,
        costs=job.table.layer,
        turns=turns(parallel, job.microbatches, stage),
        budget_bytes=budget_bytes,
        forward_slots=forward_slots(parallel),
        backward_slots=backward_slots(parallel),
        stall_ns=stall_ns,
        head_ns=job.table.head_window_ns if stage == parallel.pp - 1 else 0,
        workspace_bytes=job.workspace_bytes,
        head_bytes=job.head_bytes if stage == parallel.pp - 1 else 0,
        embedding_bytes=job.embedding_bytes if stage == 0 else 0,
        recompute_modules=KIND.recompute_modules,
    )


def parallels() -> st.SearchStrategy[Parallel]:
    """Small parallel sizes of every kind."""
    return st.sampled_from(
        [
            Parallel(),
            Parallel(tp=2),
            Parallel(tp=2, pp=2),
            Parallel(tp=2, sequence_parallel=True, pp=2),
            Parallel(pp=3),
            Parallel(tp=2, pp=3),
            Parallel(tp=2, pp=4),
            Parallel(tp=2, pp=2, vpp=2),
            Parallel(tp=2, pp=2, vpp=3),
            Parallel(tp=2, pp=3, vpp=2, sequence_parallel=True),
        ]
    )


@st.composite
def wild_plans(
    draw: st.DrawFn, stage: int, chunks: tuple[tuple[int, ...], ...], parallel: Parallel
) -> StagePlan:
    """Any plan at all, also those that no planner would make and ``verify`` would refuse."""
    graph = graph_of(parallel)
    own = [layer for chunk in chunks for layer in chunk]
    windows: list[Choice] = ["demand", Window("stall"), Window("head")]
    windows += [Window("fwd", layer, slot) for layer in own for slot in forward_slots(parallel)]
    windows += [Window("bwd", layer, slot) for layer in own for slot in backward_slots(parallel)]
    layers = []
    for layer in own:
        first = any(chunk and chunk[0] == layer for chunk in chunks)
        dropped = draw(st.sets(st.sampled_from(graph.names)))
        if first or (layer - 1) not in own or graph.names[-1] not in layers[-1].dropped:
            dropped.discard(INPUT)
        choices = tuple((n, draw(st.sampled_from(windows))) for n in graph.names if n in dropped)
        layers.append(LayerPlan(layer=layer, choices=choices))
    return StagePlan(stage=stage, chunks=chunks, layers=tuple(layers))


@st.composite
def wild_jobs(draw: st.DrawFn) -> SimJob:
    """A job with any plan on every rank, uneven stages, any times."""
    parallel = draw(parallels())
    if parallel.vpp == 1:
        microbatches = draw(st.integers(1, 9))
    else:
        microbatches = parallel.pp * draw(st.integers(1, 3))
    size = parallel.pp * parallel.vpp
    counts = draw(st.lists(st.integers(1, 3), min_size=size, max_size=size))
    table = table_of(
        parallel,
        wait=draw(st.integers(0, 120)),
        contention=draw(st.sampled_from([1.0, 1.3])),
        p2p=draw(st.integers(0, 400)),
        ends=draw(st.booleans()),
    )
    stages = tuple(
        draw(wild_plans(stage, chunks_of(counts, parallel.pp, stage), parallel))
        for stage in range(parallel.pp)
    )
    return SimJob(
        stages=stages,
        graph=graph_of(parallel),
        table=table,
        parallel=parallel,
        microbatches=microbatches,
        workspace_bytes=draw(st.sampled_from([(), (1000, 300, 2000)])),
        head_bytes=draw(st.sampled_from([0, 1500, 50_000])),
        embedding_bytes=draw(st.sampled_from([0, 1200, 40_000])),
        fine=draw(st.booleans()),
    )
