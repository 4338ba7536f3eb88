"""A plan made at the start of a run, from costs measured on the ranks that train."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import LynxError
from megatron_lynx.integration.describe import model_before_validation, optimizer_of
from megatron_lynx.integration.measuring.memory import measured_costs
from megatron_lynx.plan import Plan, parse_plan
from megatron_lynx.search.workflow import plan_with_costs
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asked for: the job, its memory per device, the planner, the split."""

    model: Model
    parallel: Parallel
    batch: Batch
    memory_bytes: int
    planner: str
    layout: str | None
    optimizer: Optimizer
    profile: Path | None


def make_plan(asked: Asked, chunks: Sequence[Any]) -> tuple[Plan, CostTable]:
    """Measure (or read the profile), plan on rank 0, and give every rank the same plan.

    Raises:
        ConfigError, InfeasibleError: on every rank alike.
    """
    if asked.profile is not None:
        table = CostTable.from_json(asked.profile.read_text(), "--lynx-profile")
    else:
        table = measured_costs(chunks, asked.model, asked.parallel, asked.batch)
    text = from_rank_0(lambda: str(_plan(asked, table)))
    return parse_plan(text), table


def _plan(asked: Asked, table: CostTable) -> Plan:
    return plan_with_costs(
        asked.model,
        asked.parallel,
        asked.batch,
        costs=table,
        memory_bytes=asked.memory_bytes,
        planner=asked.planner,
        layout=asked.layout,
        optimizer=asked.optimizer,
    )


def split_layout(args: Namespace, memory_bytes: int) -> str | None:
    """Megatron's layout string for ``--lynx-partition``; None where its even split is best.

    Runs on every rank before the model exists, so it plans with ``heu``, which no time limit stops:
    equal arguments give equal splits.

    Raises:
        ConfigError, InfeasibleError: as planning does.
    """
    table = CostTable.from_json(Path(args.lynx_profile).read_text(), "--lynx-profile")
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    parallel = Parallel(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dp=max(1, int(os.environ.get("WORLD_SIZE", "1")) // ranks),
        sequence_parallel=args.sequence_parallel,
    )
    batch = Batch(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size or args.micro_batch_size * parallel.dp,
    )
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


def from_rank_0(make: Callable[[], str]) -> str:
    """``make()`` of rank 0 on every rank; its error, if it is a user's, on every rank too."""
    box: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            box[0] = make()
        except LynxError as error:
            box[1] = error
    torch.distributed.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return str(box[0])
