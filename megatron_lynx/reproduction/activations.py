"""Table 2 of arXiv 2205.05198 against the layer graph, item by item.

Symbols: s sequence, b microbatch, h hidden, a heads, t tensor-parallel size. The paper's bytes of
one layer (16-bit tensors, 1-byte masks) are a sum of *items*, each a multiple of sbh or of as^2b.
An item is split over the tensor-parallel group always, or (what the paper's sequence parallelism
adds) only with sequence parallelism. Megatron's layer keeps a little that the paper leaves out;
those storages are *extras*, each with its own formula. Every storage of the graph belongs to
exactly one item or extra, so equality holds to the byte or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.layers import kind_of
from megatron_lynx.planner.baselines import SELECTIVE, megatron_graph
from megatron_lynx.schedule import in_flight
from megatron_lynx.spec import Batch, Model, Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A line of the paper's sum: ``sbh`` times sbh plus ``as2b`` times as^2b, in bytes.

    ``sharded``: split over the group also without sequence parallelism. ``storages`` is what holds
    it in the layer graph. ``in_attention``: dropped by selective recomputation.
    """

    name: str
    storages: tuple[str, ...]
    sbh: int = 0
    as2b: int = 0
    sharded: bool = False
    in_attention: bool = False

    def size_bytes(self, model: Model, parallel: Parallel, batch: Batch) -> int:
        """Bytes on one rank."""
        s, b, h = batch.seq_length, batch.micro_batch_size, model.hidden_size
        whole = self.sbh * s * b * h + self.as2b * model.num_attention_heads * s * s * b
        return whole // (parallel.tp if self.sharded or parallel.sequence_parallel else 1)


ITEMS = (
    Item(name="input of the first norm", storages=("input",), sbh=2),
    Item(name="input of QKV", storages=("input_layernorm.out",), sbh=2),
    Item(name="Q, K (4) and V (2): one storage", storages=("linear_qkv.out",), sbh=6, sharded=True),
    Item(
        name="output of softmax",
        storages=("core_attention.softmax",),
        as2b=2,
        sharded=True,
        in_attention=True,
    ),
    Item(
        name="mask of softmax dropout",
        storages=("core_attention.dropout_mask",),
        as2b=1,
        sharded=True,
        in_attention=True,
    ),
    Item(
        name="output of softmax dropout",
        storages=("core_attention.dropped",),
        as2b=2,
        sharded=True,
        in_attention=True,
    ),
    Item(name="input of the projection", storages=("core_attention.out",), sbh=2, sharded=True),
    Item(name="mask of attention dropout", storages=("self_attn_dropout.mask",), sbh=1),
    Item(name="input of the second norm", storages=("self_attn_bda.out",), sbh=2),
    Item(name="input of fc1", storages=("pre_mlp_layernorm.out",), sbh=2),
    Item(name="input of GELU", storages=("linear_fc1.out",), sbh=8, sharded=True),
    Item(name="input of fc2", storages=("activation.out",), sbh=8, sharded=True),
    Item(name="mask of MLP dropout", storages=("mlp_dropout.mask",), sbh=1),
)
"""Section 4.1 of the paper: attention 11sbh + 5as^2b, MLP 19sbh, two norms 4sbh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What Megatron's layer keeps and the paper leaves out, as a formula over (sb, s^2)."""

    name: str
    storage: str
    formula: str
    per_token: int = 0
    per_square: int = 0
    in_attention: bool = False

    def size_bytes(self, parallel: Parallel, batch: Batch) -> int:
        """Bytes on one rank; the norms' rows are split with sequence parallelism."""
        tokens = batch.seq_length * batch.micro_batch_size
        rows = tokens // parallel.tp if parallel.sequence_parallel else tokens
        return self.per_token * rows + self.per_square * batch.seq_length**2


EXTRAS = (
    Extra(
        name="mean and 1/deviation of the first norm, fp32",
        storage="input_layernorm.stats",
        formula="8sb",
        per_token=8,
    ),
    Extra(
        name="mean and 1/deviation of the second norm, fp32",
        storage="pre_mlp_layernorm.stats",
        formula="8sb",
        per_token=8,
    ),
    Extra(
        name="causal mask, made by each layer, one byte an entry",
        storage="core_attention.causal_mask",
        formula="s^2",
        per_square=1,
        in_attention=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A row of Table 2: how a layer is run, and the paper's formula for its bytes."""

    name: str
    formula: str
    total: Callable[[Fraction, Fraction, int], Fraction]
    """Bytes from (sbh, as^2b, t)."""
    tensor_parallel: bool = True
    sequence_parallel: bool = False
    recompute: str = "none"

    def parallel(self, tp: int) -> Parallel:
        """The parallel sizes of this row."""
        return Parallel(
            tp=tp if self.tensor_parallel else 1,
            sequence_parallel=self.sequence_parallel,
        )

    def dropped(self, graph: LayerGraph, attention: tuple[str, ...]) -> frozenset[str]:
        """Regions that are recomputed; ``attention`` by the selective kind."""
        if self.recompute == "selective":
            return frozenset(attention)
        return frozenset(graph.names) - {INPUT} if self.recompute == "full" else frozenset()


CONFIGURATIONS = (
    Configuration(
        name="no parallelism",
        formula="sbh(34 + 5as/h)",
        total=lambda x, y, t: 34 * x + 5 * y,
        tensor_parallel=False,
    ),
    Configuration(
        name="tensor parallel",
        formula="sbh(10 + 24/t + 5as/(ht))",
        total=lambda x, y, t: 10 * x + 24 * x / t + 5 * y / t,
    ),
    Configuration(
        name="tensor + sequence parallel",
        formula="sbh/t (34 + 5as/h)",
        total=lambda x, y, t: (34 * x + 5 * y) / t,
        sequence_parallel=True,
    ),
    Configuration(
        name="tensor parallel, selective",
        formula="sbh(10 + 24/t)",
        total=lambda x, y, t: 10 * x + 24 * x / t,
        recompute="selective",
    ),
    Configuration(
        name="tensor + sequence parallel, selective",
        formula="34 sbh/t",
        total=lambda x, y, t: 34 * x / t,
        sequence_parallel=True,
        recompute="selective",
    ),
    Configuration(
        name="full recomputation",
        formula="2sbh",
        total=lambda x, y, t: 2 * x,
        recompute="full",
    ),
    Configuration(
        name="full recomputation, sequence parallel",
        formula="2sbh/t",
        total=lambda x, y, t: 2 * x / t,
        sequence_parallel=True,
        recompute="full",
    ),
)
"""The rows of Table 2. The last one is the paper's full recomputation with each rank keeping its
own share of the input, which is what sequence parallelism makes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One layer's bytes under one configuration, three times over.

    ``formula_bytes`` is the closed form, ``items`` and ``extras`` are (name, by formula, in the
    graph), ``graph_bytes`` is what ``LayerGraph.kept_bytes`` says, ``unknown`` the storages that
    are kept and belong to no item and no extra.
    """

    configuration: Configuration
    formula_bytes: Fraction
    items: tuple[tuple[str, int, int], ...]
    extras: tuple[tuple[str, int, int], ...]
    graph_bytes: int
    unknown: tuple[str, ...]

    @property
    def extra_bytes(self) -> int:
        """Bytes that the paper leaves out."""
        return sum(found for _, _, found in self.extras)

    @property
    def exact(self) -> bool:
        """Whether every line agrees to the byte and nothing is left over."""
        lines = (*self.items, *self.extras)
        return (
            not self.unknown
            and all(formula == found for _, formula, found in lines)
            and self.formula_bytes == sum(found for _, _, found in self.items)
            and self.formula_bytes + self.extra_bytes == self.graph_bytes
        )


def account(configuration: Configuration, model: Model, batch: Batch, tp: int) -> Account:
    """Compare one configuration of one model; ``model`` needs unfused attention and dropout."""
    parallel = configuration.parallel(tp)
    kind = kind_of(model)
    graph, attention = kind.graph(model, parallel, batch), kind.recompute_modules[SELECTIVE]
    if configuration.recompute == "selective":
        graph = megatron_graph(graph, attention)
    dropped = configuration.dropped(graph, attention)
    kept = {s.name: s for s in graph.storages if graph.is_kept(s, dropped)}
    mode = configuration.recompute
    items = tuple(
        (
            item.name,
            item.size_bytes(model, parallel, batch)
            if _stays(item.storages[0], item.in_attention, mode)
            else 0,
            sum(kept[name].size_bytes for name in item.storages if name in kept),
        )
        for item in ITEMS
    )
    extras = tuple(
        (
            extra.name,
            extra.size_bytes(parallel, batch) if _stays(extra.storage, extra.in_attention, mode) else 0,
            kept[extra.storage].size_bytes if extra.storage in kept else 0,
        )
        for extra in EXTRAS
    )
    known = {name for item in ITEMS for name in item.storages} | {extra.storage for extra in EXTRAS}
    s, b = batch.seq_length, batch.micro_batch_size
    total = configuration.total(
        Fraction(s * b * model.hidden_size), Fraction(model.num_attention_heads * s * s * b), parallel.tp
    )
    return Account(
        configuration=configuration,
        formula_bytes=total,
        items=items,
        extras=extras,
        graph_bytes=graph.kept_bytes(dropped),
        unknown=tuple(sorted(set(kept) - known)),
    )


def _stays(storage: str, in_attention: bool, recompute: str) -> bool:
    """Whether the paper counts a storage: selective drops the inside of attention, full all but
    the layer's input."""
    return recompute == "none" or (recompute == "selective" and not in_attention) or storage == INPUT


def accounts(models: Sequence[tuple[Model, Batch, int]]) -> Iterator[tuple[Model, Account]]:
    """Every configuration of every (model, batch, t)."""
    for model, batch, tp in models:
        for configuration in CONFIGURATIONS:
            yield model, account(configuration, model, batch, tp)


def first_stage_factor(pp: int, vpp: int, microbatches: int) -> tuple[Fraction, Fraction]:
    """Layers' worth of activations on the first stage, per layer of the model: the paper's, ours.

    Section 4.2.3 of the paper: 1 for 1F1B (p microbatches of L/p layers), 1 + (p - 1)/(pm) with m
    chunks. Ours counts the microbatches alive in each chunk of Megatron's order.
    """
    parallel = Parallel(pp=pp, vpp=vpp)
    alive = sum(in_flight(parallel, microbatches, 0))
    paper = 1 + Fraction(pp - 1, pp * vpp) if vpp > 1 else Fraction(1)
    return paper, Fraction(alive, pp * vpp)
