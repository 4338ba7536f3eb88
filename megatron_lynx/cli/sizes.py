"""Sizes that Megatron derives: VPP, DP from the number of ranks, the layout that other flags mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_lynx.cli.megatron_args import MegatronArgs
from megatron_lynx.errors import ConfigError
from megatron_lynx.partition.layout import parse_stages


def derive(
    values: dict[str, Any], num_layers: int, script: MegatronArgs | None, chosen: Collection[str]
) -> list[str]:
    """Replace what a launch says by what it means; returns notes.

    ``chosen`` are the fields that the user gave beside the launch, which stay.

    Raises:
        ConfigError: sizes that do not fit together, or a number of ranks that nothing says.
    """
    notes = []
    per_stage = values.pop("layers_per_virtual_stage", None)
    if per_stage and "vpp" not in chosen:
        values["vpp"] = _virtual_stages(num_layers, values["pp"], per_stage)
    layout = _layout(values, num_layers)
    if layout is not None and "layout" not in chosen and "layout" not in values:
        values["layout"] = layout
    if "layout" in values:
        _check_letters(values["layout"])
        if script is not None and "vpp" not in chosen and per_stage is None:
            values["vpp"] = max(1, len(parse_stages(values["layout"])) // values["pp"])
    if (
        script is not None
        and values["tp"] == 1
        and values["sequence_parallel"]
        and "sequence_parallel" not in chosen
    ):
        values["sequence_parallel"] = False
        notes.append("--sequence-parallel is cleared, as Megatron does with TP 1")
    notes += _data_parallel(values, script, chosen)
    return notes


def _virtual_stages(num_layers: int, pp: int, per_stage: int) -> int:
    layers = num_layers // pp
    if per_stage < 1 or layers % per_stage:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the {layers} layers of a "
            "stage; 1 works"
        )
    return layers // per_stage


def _check_letters(layout: str) -> None:
    if "m" in layout:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {layout!r} has m, a layer of multi-token prediction, which is "
            f"not planned; {layout.replace('m', '')!r} plans the main model"
        )


def _layout(values: dict[str, Any], num_layers: int) -> str | None:
    """The layout that flags for uneven ends, or for the embedding's and the loss's share, mean."""
    pp, vpp = values["pp"], values["vpp"]
    first, last = values.pop("first_stage_layers", None), values.pop("last_stage_layers", None)
    embedding, loss = values.pop("embedding_counts", False), values.pop("loss_counts", False)
    if embedding or loss:
        return _counted_ends(num_layers, pp * vpp, embedding=embedding, loss=loss)
    if first is None and last is None:
        return None
    inner = pp - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    flag, given = ("first", first) if first is not None else ("last", last)
    if inner < 0 or rest < 0 or (inner == 0 and rest) or (inner and rest % inner):
        raise ConfigError(
            f"--decoder-{flag}-pipeline-num-layers {given} leaves {rest} layers for {inner} stages; leave it "
            "out for an even split"
        )
    ranks = [rest // inner if inner else 0] * inner
    ranks = ([first] if first is not None else []) + ranks + ([last] if last is not None else [])
    if any(count % vpp for count in ranks):
        raise ConfigError(
            f"--decoder-{flag}-pipeline-num-layers {given} gives ranks {' '.join(map(str, ranks))} layers, "
            f"which are not all multiples of --vpp {vpp}; --vpp 1 works"
        )
    return _text([count // vpp for count in ranks] * vpp)


def _counted_ends(num_layers: int, stages: int, *, embedding: bool, loss: bool) -> str:
    """Embedding and loss count as a layer each: the first and last stage have one less."""
    total = num_layers + embedding + loss
    if total % stages or total // stages < embedding + (loss if stages == 1 else 0):
        flag = (
            "--account-for-embedding-in-pipeline-split"
            if embedding
            else "--account-for-loss-in-pipeline-split"
        )
        works = (total // stages + 1) * stages - embedding - loss
        raise ConfigError(
            f"{flag}: {total} layers, ends included, do not divide over {stages} stages; "
            f"--num-layers {works} would"
        )
    counts = [total // stages] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    return _text(counts)


def _text(counts: list[int]) -> str:
    return "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "L"


def _data_parallel(values: dict[str, Any], script: MegatronArgs | None, chosen: Collection[str]) -> list[str]:
    """DP from the number of ranks: given, or what the launcher starts."""
    world, flag = values.pop("world_size", None), "--world-size"
    if "dp" in chosen and world is None:
        return []
    if world is None:
        if script is None:
            return []
        if script.world_size is None:
            raise ConfigError(
                f"--world-size is not given, and the launch does not say it: {script.world_reason}; "
                "--world-size 64 works, or --dp 8"
            )
        world, flag = script.world_size, f"{script.world_reason}:"
    ranks = values["tp"] * values["pp"] * (script.context_parallel if script else 1)
    if world < 1 or world % ranks:
        sizes = f"--tp {values['tp']} x --pp {values['pp']}"
        raise ConfigError(
            f"{flag} {world} ranks are not a multiple of {sizes} = {ranks}; --world-size {ranks} works"
        )
    if "dp" in chosen and values["dp"] != world // ranks:
        raise ConfigError(
            f"--dp {values['dp']} and --world-size {world} do not agree; --dp {world // ranks} works"
        )
    values["dp"] = world // ranks
    return [f"{world} ranks ({script.world_reason})"] if script and world == script.world_size else []


def summary(found: MegatronArgs) -> Mapping[str, Any]:
    """What a launch trains, for people: the fields that are known."""
    names = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
    )
    sizes = {name.replace("_", "-"): found.values[name] for name in names if name in found.values}
    parallel = {name.upper(): found.values[name] for name in ("tp", "pp") if name in found.values}
    return {**sizes, **parallel, "ranks": found.world_size or f"unknown: {found.world_reason}"}
