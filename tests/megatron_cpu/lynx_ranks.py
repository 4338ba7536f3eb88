"""Functions that run inside ranks: train stock and under plans, and compare bit for bit."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import configure_nvtx_profiling, get_model_config
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lynx.graph import LayerGraph
from megatron_lynx.integration.binding import transformer_layers
from megatron_lynx.integration.describe import layer_options
from megatron_lynx.integration.install import install
from megatron_lynx.integration.session import Session
from megatron_lynx.layers import KINDS, layer_graph
from megatron_lynx.plan import LayerPlan, StagePlan, parse_choice
from megatron_lynx.runtime.record import StepRecord
from megatron_lynx.runtime.region import RegionRun, Replay, flatten
from megatron_lynx.runtime.storage import SavedTensor, TapeStorage
from megatron_lynx.runtime.tape import LayerTape
from megatron_lynx.spec import Batch, Model, Parallel
from tests.support.small_gpt import (
    MICRO_BATCH,
    SEQUENCE,
    VOCABULARY,
    standing_in_for_apex,
    train_small_gpt,
)

DROPPABLE = (
    "input_layernorm",
    "linear_qkv",
    "qkv_split",
    "core_attention",
    "self_attn_dropout",
    "pre_mlp_layernorm",
    "linear_fc1",
    "activation",
    "mlp_dropout",
)
EVERYTHING = (*DROPPABLE[:4], "linear_proj", *DROPPABLE[4:5], "self_attn_bda", *DROPPABLE[5:])
"""Every region that can be dropped, those behind a collective too, in forward order."""

Assignment = dict[int, dict[str, str]]
"""By layer and region: a choice in text form. A layer or region that is left out is kept."""


@dataclass
class Case:
    """A model and its parallel sizes (keywords of ``train_small_gpt``) and the plans to try.

    A plan is a name (see ``assignment``) or an assignment of its own.
    """

    model: dict[str, Any]
    plans: list[str | Assignment] = field(default_factory=list)
    steps: int = 3


def stage_plan(
    plan: str | Assignment, stage: int, chunks: tuple[tuple[int, ...], ...], parallel: Parallel
) -> StagePlan:
    """The plan of one stage with these chunks."""
    layers = tuple(layer for chunk in chunks for layer in chunk)
    whole = assignment(plan, layers, parallel) if isinstance(plan, str) else plan
    return StagePlan(
        stage=stage,
        chunks=chunks,
        layers=tuple(
            LayerPlan(
                layer=layer,
                choices=tuple((r, parse_choice(c)) for r, c in whole.get(layer, {}).items() if c != "keep"),
            )
            for layer in layers
        ),
    )


def assignment(name: str, layers: tuple[int, ...], parallel: Parallel) -> Assignment:
    """The plan called ``name``: none, selective, full, uniform-2, quiet or windows."""
    made: Assignment = {layer: {} for layer in layers}
    if name == "selective":
        made = {layer: {"core_attention": "demand"} for layer in layers}
    elif name in ("full", "uniform-2"):
        made = {layer: dict.fromkeys(EVERYTHING, "demand") for layer in layers}
        if name == "uniform-2":
            for layer in layers:
                if layer % 2 and layer - 1 in layers:
                    made[layer] = {"input": "demand", **made[layer]}
    elif name in ("quiet", "windows"):
        for layer in layers:
            for region in DROPPABLE:
                if not (parallel.sequence_parallel and region in ("linear_qkv", "linear_fc1")):
                    window = _window_of(region, layer, layers, parallel)
                    made[layer][region] = "demand" if name == "quiet" else window
    elif name != "none":
        raise ValueError(name)
    return made


def _window_of(region: str, layer: int, layers: tuple[int, ...], parallel: Parallel) -> str:
    """Attention in the MLP's backward window of its layer, the MLP in a window of the layer after."""
    slots = KINDS["local"].backward_slots(parallel)
    if not slots:
        return "stall"
    if region in DROPPABLE[:5]:
        return f"bwd:{layer}:{slots[0]}"
    return f"bwd:{layer + 1}:{slots[-1]}" if layer + 1 in layers else "head"


def parallel_of(model: dict[str, Any]) -> Parallel:
    """The parallel sizes of a case."""
    return Parallel(
        tp=model.get("tp", 1),
        pp=model.get("pp", 1),
        vpp=model.get("vpp") or 1,
        cp=model.get("cp", 1),
        cp_comm_type=model.get("cp_comm_type", "p2p"),
        sequence_parallel=model.get("sequence_parallel", False),
    )


BATCH = Batch(seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH, global_batch_size=MICRO_BATCH)


def described_model(options: dict[str, Any], config: Any) -> Model:
    """The Model that describes what ``train_small_gpt`` builds from ``options``."""
    impl = "toy" if options.get("spec") else "transformer_engine" if options.get("te") else "local"
    return Model(
        vocab_size=VOCABULARY,
        position_embedding_type="rope" if options.get("rope") else "learned_absolute",
        rotary_percent=options.get("rotary_percent", 1.0),
        **layer_options(config, impl, torch.device("cpu")),
    )


def described_graph(options: dict[str, Any], chunks: list[Any]) -> LayerGraph:
    """The graph of the layers of what ``train_small_gpt`` builds from ``options``."""
    model = described_model(options, get_model_config(chunks[0]))
    sequences, length = options.get("shape", (MICRO_BATCH, SEQUENCE))
    batch = Batch(seq_length=length, micro_batch_size=sequences, global_batch_size=sequences)
    return layer_graph(model, parallel_of(options), batch)


Watch = Callable[[Session], contextlib.AbstractContextManager[None]]


def train_with_plan(
    model: dict[str, Any],
    plan: str | Assignment,
    steps: int,
    watch: Watch | None = None,
    count_kept: bool = False,
    graph: LayerGraph | None = None,
    before: Callable[[list[Any]], None] | None = None,
) -> dict[str, Any]:
    """Train under a plan; the result has ``records`` too, one StepRecord a step, and the layers' ``graph``.

    ``watch`` is a context around the training that sees the session; ``before`` is called with the model
    before the plan is bound.
    """
    records: list[StepRecord] = []
    graphs: list[LayerGraph] = []

    @contextlib.contextmanager
    def around(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        parallel = parallel_of(model)
        owned = tuple(
            tuple(layer.layer_number - 1 for layer in layers) for layers in transformer_layers(chunks)
        )
        stage = stage_plan(plan, parallel_state.get_pipeline_model_parallel_rank(), owned, parallel)
        with install() as hooks:
            graphs.append(graph or described_graph(model, chunks))
            if before is not None:
                before(chunks)
            session = Session(hooks, stage, parallel, chunks, graphs[0], count_kept=count_kept)
            session.on_step = records.append
            with watch(session) if watch else contextlib.nullcontext():
                yield session.wrap_schedule
            session.close()

    result = train_small_gpt(steps=steps, around=around, **model)
    return {**result, "records": records, "graph": graphs[0]}


def differences(stock: dict[str, Any], lynx: dict[str, Any]) -> list[str]:
    """What differs in any bit: losses, gradient norms, gradients, parameters."""
    found = [
        f"{key}: {stock[key]} != {lynx[key]}" for key in ("losses", "grad_norms") if stock[key] != lynx[key]
    ]
    for step, (ours, theirs) in enumerate(zip(stock["gradients"], lynx["gradients"], strict=True)):
        found += [f"gradient {n} of step {step}" for n in ours if not torch.equal(ours[n], theirs[n])]
    found += [n for n, p in stock["parameters"].items() if not torch.equal(p, lynx["parameters"][n])]
    return found


@dataclass
class Outcome:
    """One plan on one rank: what differs from stock Megatron, what the tape counted, what was warned of."""

    case: str
    different: list[str]
    left_bytes: int
    rebuilt: dict[str, int]
    warned: list[str]


def compare(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    """Train every case stock and under each of its plans."""
    found = []
    for case in cases:
        stock = train_small_gpt(steps=case.steps, **case.model)
        for plan in case.plans:
            with _warnings() as warned:
                lynx = train_with_plan(case.model, plan, case.steps)
            rebuilt: Counter[str] = Counter()
            for record in lynx["records"]:
                rebuilt.update(record.rebuilt_storages)
            left = sum(record.left_bytes for record in lynx["records"])
            name = f"{case.model} {plan}"
            found.append(Outcome(name, differences(stock, lynx), left, dict(rebuilt), warned))
    return found


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What lynx warns of inside."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_lynx")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def compare_with_fusion(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    """``compare`` where linears add to the main gradients by themselves."""
    with standing_in_for_apex():
        return compare(rank, world_size, cases)


def seen_by_hooks(rank: int, world_size: int, plan: str) -> dict[str, list[str]]:
    """What the hooks of a user's modules see in one step, stock and under a plan: module and shapes."""
    found: dict[str, list[str]] = {}

    def hooked(chunks: list[Any], name: str) -> None:
        found[name] = seen = []
        for path, module in chunks[0].named_modules():
            module.register_forward_hook(
                lambda _, args, out, path=path: seen.append(
                    f"{path} {[t.shape for t in flatten((args, out))]}"
                )
            )

    @contextlib.contextmanager
    def stock(chunks: list[Any]) -> Iterator[Callable[..., Any]]:
        hooked(chunks, "stock")
        yield lambda schedule: schedule

    train_small_gpt(steps=1, around=stock, rope=True)
    nvtx = [torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop]
    depth: list[str] = []
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = depth.append, depth.pop
    configure_nvtx_profiling(True)
    try:
        train_with_plan({"rope": True}, plan, 1, before=lambda chunks: hooked(chunks, "lynx"))
    finally:
        configure_nvtx_profiling(False)
        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = nvtx
    found["ranges left open"] = depth
    return found


@contextlib.contextmanager
def counted_collectives(counts: Counter[str]) -> Iterator[None]:
    """Count what goes over gloo, below everything that is installed."""
    gathers = ("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single")
    names = ("allreduce", *gathers, "send", "recv")
    group = torch.distributed.ProcessGroup
    originals = {name: getattr(group, name) for name in names if hasattr(group, name)}

    def counting(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return run

    for name in originals:
        setattr(group, name, counting(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


def count_collectives(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Counter[str]]]:
    """For each case: collectives of stock training and under each plan."""
    found = []
    for case in cases:
        counts: dict[str, Counter[str]] = {"stock": Counter()}
        with counted_collectives(counts["stock"]):
            train_small_gpt(steps=case.steps, **case.model)
        for plan in case.plans:
            counts[str(plan)] = Counter()
            with counted_collectives(counts[str(plan)]):
                train_with_plan(case.model, plan, case.steps)
        found.append(counts)
    return found


def leftovers(rank: int, world_size: int, cases: list[Case]) -> list[tuple[str, int, list[int]]]:
    """For each case and plan: rebuilt storages and tapes' objects alive after its first and last five steps,
    and live bytes after each of those. (Counting takes longer than a step.)"""
    found = []
    for case in cases:
        for plan in case.plans:
            rebuilt: list[StorageWeakRef] = []
            alive: list[int] = []
            live: list[int] = []
            model = {**case.model, "keep_gradients": False}
            counted = {*range(5), *range(case.steps - 5, case.steps)}
            watch = partial(_watch_memory, counted, rebuilt, alive, live)
            train_with_plan(model, plan, case.steps, watch=watch)
            found.append((f"{case.model} {plan}", sum(alive) if rebuilt else -1, live))
    return found


@contextlib.contextmanager
def _watch_memory(
    counted: set[int], rebuilt: list[StorageWeakRef], alive: list[int], live: list[int], session: Session
) -> Iterator[None]:
    """Python's collector is off meanwhile: whatever a step leaves must go by reference count alone."""
    original = TapeStorage.fill

    def fill(self: TapeStorage, data: torch.Tensor) -> None:
        rebuilt.append(StorageWeakRef(data.untyped_storage()))
        original(self, data)

    steps = itertools.count()

    def after_step(_: StepRecord) -> None:
        if next(steps) not in counted:
            rebuilt[:] = [reference for reference in rebuilt if not reference.expired()]
            return
        alive.append(objects_of_tapes() - before + sum(not reference.expired() for reference in rebuilt))
        live.append(live_bytes())

    session.on_step = after_step
    before = objects_of_tapes()
    TapeStorage.fill = fill  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        TapeStorage.fill = original  # type: ignore[method-assign]


def objects_of_tapes() -> int:
    """How many objects of tapes there are."""
    ours = (LayerTape, RegionRun, Replay, SavedTensor, TapeStorage)
    return sum(isinstance(thing, ours) for thing in gc.get_objects())


def live_bytes() -> int:
    """Bytes of every storage that some tensor of this process holds."""
    sizes = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())
