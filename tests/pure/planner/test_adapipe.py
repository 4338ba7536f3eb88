"""AdaPipe's units under grouped queries and rotary embeddings, where queries and keys are copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.job import make_job
from megatron_lynx.planner import plan
from megatron_lynx.planner.adapipe import adapipe_units
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.problems import stage_problem
from megatron_lynx.spec import Batch, Parallel


def problem(sequence_parallel: bool, attention: str) -> StageProblem:
    job = make_job(
        load_model("llama3-8b", attention=attention),
        Parallel(tp=4, pp=4, sequence_parallel=sequence_parallel),
        Batch(seq_length=4096, micro_batch_size=1, global_batch_size=16),
        cluster=load_cluster("h100-nvlink"),
    )
    return stage_problem(job, 0, (tuple(range(8)),))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_attention_is_a_unit(sequence_parallel: bool, attention: str) -> None:
    one = problem(sequence_parallel, attention)
    units = [region for unit in adapipe_units(one) for region in unit.regions]
    assert "core_attention" in units
    assert len(units) == len(set(units)), "a region belongs to one unit"
    assert not any(one.graph.region(region).communicates for region in units)


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_more_memory_never_costs_more(attention: str) -> None:
    one = problem(False, attention)
    with pytest.raises(InfeasibleError) as caught:
        plan(replace(one, budget_bytes=1), "adapipe")
    least = caught.value.needed_bytes
    shares = (1.0, 1.1, 1.5, 2.0, 3.0)
    found = [plan(replace(one, budget_bytes=int(least * s)), "adapipe").report for s in shares]
    times = [report.exposed_ns for report in found]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
