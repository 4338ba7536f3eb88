"""Our schedules against the tables that Megatron-Core itself runs from."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

from megatron_lynx.schedule import Action, actions
from megatron_lynx.spec import Parallel


def _communicator(rank: int, size: int, chunks: int | None) -> SimpleNamespace:
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)


def _megatron_order(parallel: Parallel, microbatches: int, stage: int) -> list[Action]:
    """Megatron's order of (kind, chunk), with microbatches counted first in, first out."""
    chunks = parallel.vpp
    table = get_schedule_table(microbatches, chunks, parallel.group_size)
    virtual = chunks if chunks > 1 else None
    _, _, warmup, _ = get_pp_rank_microbatches(
        microbatches,
        chunks,
        parallel.group_size,
        p2p_communicator=_communicator(stage, parallel.pp, virtual),
    )
    forwards = iter(table)
    seen = [0] * chunks
    order = []
    for entry in convert_schedule_table_to_order(warmup, chunks, table):
        if entry > 0:
            microbatch, chunk = next(forwards)
            assert chunk == entry - 1
            order.append(Action("F", microbatch, chunk))
        else:
            chunk = -entry - 1
            order.append(Action("B", seen[chunk], chunk))
            seen[chunk] += 1
    return order


@pytest.mark.parametrize(("stages", "microbatches"), list(product([1, 2, 3, 4, 8], [1, 2, 3, 5, 8, 17])))
def test_one_f_one_b_is_megatrons(stages: int, microbatches: int) -> None:
    parallel = Parallel(pp=stages)
    for stage in range(stages):
        assert list(actions(parallel, microbatches, stage)) == _megatron_order(parallel, microbatches, stage)


@pytest.mark.parametrize(
    ("stages", "chunks", "groups"), list(product([2, 3, 4, 8], [2, 3, 4], [(0, 0), (1, 0), (2, 1), (5, 2)]))
)
def test_interleaved_is_megatrons(stages: int, chunks: int, groups: tuple[int, int]) -> None:
    extra, more = groups
    size = stages + extra
    for microbatches in (size, 3 * size, 2 * size + min(stages + more, size)):
        parallel = Parallel(pp=stages, vpp=chunks, microbatch_group_size=size)
        for stage in range(stages):
            ours = list(actions(parallel, microbatches, stage))
            assert ours == _megatron_order(parallel, microbatches, stage)
