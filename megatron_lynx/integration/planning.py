"""A plan made at the start of a run, from costs measured on the ranks that train."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError, PlanError
from megatron_lynx.integration.agree import from_rank_0, gathered, on_every_rank
from megatron_lynx.integration.binding import transformer_layers
from megatron_lynx.integration.describe import model_before_validation, optimizer_of
from megatron_lynx.integration.measuring.memory import measured_costs
from megatron_lynx.integration.words import in_trainings_words
from megatron_lynx.partition.layout import Layout, chunks_of
from megatron_lynx.plan import Plan, parse_plan
from megatron_lynx.search.check import Chunks, check_plan_for
from megatron_lynx.search.workflow import plan_with_costs
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asked for: the job, its memory per device, the planner, the split.

    ``stages`` are the layers that each stage of the model really has, ``layout`` the same as Megatron's
    layout string; None where the split is even. ``counted`` are each stage's parameters, and how many train;
    ``fixed`` the regions that no layer can run again.
    """

    model: Model
    parallel: Parallel
    batch: Batch
    memory_bytes: int
    planner: str
    layout: str | None
    stages: tuple[Chunks, ...]
    counted: tuple[tuple[int, int], ...]
    fixed: frozenset[str]
    optimizer: Optimizer
    profile: Path | None


def make_plan(asked: Asked, chunks: Sequence[Any]) -> tuple[Plan, CostTable]:
    """Measure (or read the profile), plan on rank 0, and give every rank the same plan.

    Raises:
        ConfigError, InfeasibleError: on every rank alike.
    """
    if asked.profile is not None:
        table = on_every_rank(lambda: read_profile(asked))
    else:
        table = measured_costs(chunks, asked.model, asked.parallel, asked.batch)
    text = from_rank_0(lambda: str(_plan(asked, table)))
    return parse_plan(text), table


def read_profile(asked: Asked) -> CostTable:
    """The costs in ``--lynx-profile FILE``.

    Raises:
        ConfigError: it cannot be read, or was measured for other layers.
    """
    assert asked.profile is not None
    where = f"--lynx-profile {asked.profile}"
    try:
        text = asked.profile.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read ({error}); `lynx profile` writes one") from error
    return CostTable.from_json(text, where)


def read_plan(path: Path, asked: Asked) -> Plan:
    """The plan in ``--lynx-plan FILE``.

    Raises:
        PlanError: it cannot be read, is malformed, was made for another job, or names what this one lacks.
    """
    try:
        plan = parse_plan(path.read_text("utf-8"))
        check_plan_for(plan, asked.model, asked.parallel, asked.batch, asked.stages)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--lynx-plan {path} cannot be read ({error}); `lynx plan` writes one") from error
    except PlanError as error:
        raise PlanError(f"--lynx-plan {path}: {error}") from error
    return plan


def _plan(asked: Asked, table: CostTable) -> Plan:
    with in_trainings_words():
        return plan_with_costs(
            asked.model,
            asked.parallel,
            asked.batch,
            costs=table,
            memory_bytes=asked.memory_bytes,
            planner=asked.planner,
            layout=asked.layout,
            optimizer=asked.optimizer,
            counted=asked.counted,
            fixed=asked.fixed,
        )


def split_layout(args: Namespace, memory_bytes: int) -> str | None:
    """Megatron's layout string for ``--lynx-partition``; None where its even split is best.

    Runs on every rank before the model exists, so it plans with ``heu``, which no time limit stops:
    equal arguments give equal splits.

    Raises:
        ConfigError, InfeasibleError: as planning does.
    """
    table = CostTable.from_json(Path(args.lynx_profile).read_text("utf-8"), "--lynx-profile")
    cp = args.context_parallel_size
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * cp
    parallel = Parallel(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dp=max(1, int(os.environ.get("WORLD_SIZE", "1")) // ranks),
        cp=cp,
        cp_comm_type=(args.cp_comm_type or ["p2p"])[0],
        sequence_parallel=args.sequence_parallel,
    )
    batch = Batch(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size or args.micro_batch_size * parallel.dp,
    )
    with in_trainings_words():
        plan = plan_with_costs(
            model_before_validation(args),
            parallel,
            batch,
            costs=replace(table, graph=""),  # measured for the exact shape; this one lacks the padding
            memory_bytes=memory_bytes,
            planner="heu",
            partition=args.lynx_partition,
            optimizer=optimizer_of(args),
        )
    return plan.layout


def counted_parameters(chunks: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """The parameters of each stage, and how many of them train; every rank must call it."""
    own = {id(p): p for chunk in chunks for p in chunk.parameters()}.values()
    counts = sum(p.numel() for p in own), sum(p.numel() for p in own if p.requires_grad)
    found = gathered((parallel_state.get_pipeline_model_parallel_rank(), counts))
    return tuple(counts for _, counts in sorted(dict(found).items()))


def split_of(chunks: Sequence[Any]) -> tuple[tuple[Chunks, ...], str | None]:
    """The layers that each stage of the model really has, whatever flags made it so; and Megatron's layout
    string for it, None where it is even. Every rank must call it."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    own = tuple(tuple(layer.layer_number - 1 for layer in layers) for layers in transformer_layers(chunks))
    by_stage = dict(gathered((rank, own)))
    stages = tuple(by_stage[stage] for stage in sorted(by_stage))
    counts = [len(stage[chunk]) for chunk in range(len(own)) for stage in stages]
    for stage, found in enumerate(stages):
        if found != chunks_of(counts, len(stages), stage):
            raise ConfigError(
                f"--recompute-method lynx: stage {stage} of the model has the layers {found}, which do not "
                "follow on each other; a model of transformer layers alone works"
            )
    predictions = get_model_config(chunks[0]).mtp_num_layers or 0
    uneven = len(set(counts)) > 1
    return stages, str(Layout.from_counts(counts, len(stages), predictions)) if uneven else None
