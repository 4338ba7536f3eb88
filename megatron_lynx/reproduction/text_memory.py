"""Table 2 and the FLOPs of arXiv 2205.05198 as Markdown."""

from __future__ import annotations

from megatron_lynx.presets import load_model
from megatron_lynx.reproduction.activations import (
    CONFIGURATIONS,
    EXTRAS,
    ITEMS,
    Account,
    Extra,
    Item,
    account,
    first_stage_factor,
)
from megatron_lynx.reproduction.markdown import prose, table
from megatron_lynx.reproduction.published import MODEL_ROWS, SELECTIVE_SAVINGS, SEQUENCE, ModelRow
from megatron_lynx.reproduction.timing import forward_flops, layer_flops
from megatron_lynx.spec import Batch, Model, Parallel

SHAPES = MODEL_ROWS[:4]
"""The four models of the paper."""


def shape(row: ModelRow) -> tuple[Model, Batch]:
    """A model with all that the paper counts (each layer makes its causal mask), and its batch."""
    batch = Batch(
        seq_length=SEQUENCE, micro_batch_size=row.micro_batch_size, global_batch_size=row.global_batch_size
    )
    return load_model(
        row.model, transformer_impl="local", attention="unfused", masked_softmax_fusion=False
    ), batch


def activations() -> str:
    """The section about Table 2."""
    lines = []
    for configuration in CONFIGURATIONS:
        for row in SHAPES:
            model, batch = shape(row)
            lines.append(
                [
                    configuration.name,
                    f"`{configuration.formula}`",
                    row.name,
                    *_sums(row, model, batch, configuration.name),
                ]
            )
    return "\n".join(
        [
            "### Table 2: bytes of a layer, exact\n",
            prose(
                "One layer, one microbatch, one rank, in bytes; t = 8, sequence 2048, microbatch 4 for 22B",
                "and 1 for the others. *Formula* is the paper's closed form, *graph* what `LayerGraph` "
                "keeps,",
                "*extras* what Megatron's layer keeps and the paper leaves out. Equal means: every item "
                "agrees",
                "to the byte, every storage of the graph belongs to an item or an extra, and formula + "
                "extras",
                "= graph.",
            ),
            table(("configuration", "formula", "model", "formula", "extras", "graph", "equal"), lines),
            _items(),
            _first_stage(),
        ]
    )


def _sums(row: ModelRow, model: Model, batch: Batch, name: str) -> list[str]:
    found = _account(row, model, batch, name)
    total = int(found.formula_bytes)
    return [f"{total:,}", f"{found.extra_bytes:,}", f"{found.graph_bytes:,}", "yes" if found.exact else "NO"]


def _account(row: ModelRow, model: Model, batch: Batch, name: str) -> Account:
    configuration = next(c for c in CONFIGURATIONS if c.name == name)
    return account(configuration, model, batch, row.tp)


def item_formula(item: Item) -> str:
    """``2 sbh`` or ``5 as^2b``."""
    return f"{item.sbh} sbh" if item.sbh else f"{item.as2b} as^2b"


def _items() -> str:
    """Item by item, 22B, tensor parallel without and with sequence parallelism."""
    row = SHAPES[0]
    model, batch = shape(row)
    plain, split = (_account(row, model, batch, c.name) for c in CONFIGURATIONS[1:3])
    lines = []
    named: list[Item | Extra] = [*ITEMS, *EXTRAS]
    for thing, left, right in zip(
        named, (*plain.items, *plain.extras), (*split.items, *split.extras), strict=True
    ):
        formula = item_formula(thing) if isinstance(thing, Item) else f"{thing.formula} (extra)"
        storages = ", ".join(thing.storages if isinstance(thing, Item) else (thing.storage,))
        cells = [f"{paper:,} = {graph:,}" for _, paper, graph in (left, right)]
        lines.append([thing.name, formula, f"`{storages}`", *cells])
    return "\n".join(
        [
            prose(
                "Item by item, 22B, formula = graph. An item is split over the group if it lies between two",
                "linears; what lies outside is whole on every rank unless sequence parallelism splits it.",
            ),
            table(("item", "bytes", "storage", "tensor parallel", "tensor + sequence parallel"), lines),
            prose(
                "Megatron keeps each input of a GEMM once: Q, K and V are views of one fused output, a "
                "norm's",
                "output is the linear's input, and the output of softmax dropout is kept beside its mask, as",
                "in the paper.",
            ),
        ]
    )


def _first_stage() -> str:
    lines = []
    for row in SHAPES:
        paper, ours = first_stage_factor(row.pp, row.vpp, row.global_batch_size // row.micro_batch_size)
        chunks = f"p = {row.pp}" + (f", {row.vpp} chunks" if row.vpp > 1 else "")
        lines.append([row.name, chunks, str(paper), str(ours), "yes" if paper == ours else "NO"])
    return "\n".join(
        [
            prose(
                "Activations on the first stage, in units of all the model's layers for one "
                "microbatch: 1 for",
                "1F1B, 1 + (p - 1)/(pm) with m chunks. Ours counts what is alive in Megatron's order of",
                "actions.",
            ),
            table(("model", "pipeline", "paper", "schedule", "equal"), lines),
        ]
    )


def flops() -> str:
    """The section about FLOPs."""
    lines = []
    for row in SHAPES:
        model, batch = shape(row)
        parallel = Parallel(tp=row.tp)
        counted = layer_flops(model, parallel, batch)
        same = counted.forward == forward_flops(model, parallel, batch)
        twice = counted.backward == 2 * counted.forward
        selective = _account(row, model, batch, CONFIGURATIONS[4].name)
        whole = _account(row, model, batch, CONFIGURATIONS[2].name)
        saved = 1 - selective.formula_bytes / whole.formula_bytes
        share = counted.attention / counted.forward
        printed = SELECTIVE_SAVINGS.get(row.model)
        lines.append(
            [
                row.name,
                f"{counted.forward:,}",
                "yes" if same and twice else "NO",
                f"{float(saved):.1%}" + (f" ({printed[0]})" if printed else ""),
                f"{share:.2%}" + (f" ({printed[1]})" if printed else ""),
                f"{share / 3:.2%}",
            ]
        )
    head = (
        "model",
        "forward of a layer",
        "= 24bsh^2(1 + s/6h)/t, backward twice that",
        "bytes that selective saves (published)",
        "FLOPs it repeats, of the forward (published)",
        "of the step",
    )
    return "\n".join(
        [
            "### FLOPs, exact\n",
            prose(
                "Counted from the kernels of the estimate. The published cost of selective recomputation,",
                "2.7 % and 1.6 %, is the share of the two attention products in a *forward*; of a whole step",
                "it is a third.",
            ),
            table(head, lines),
        ]
    )
