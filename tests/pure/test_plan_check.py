"""A plan that was read is checked against its job: sound ones pass, each planted fault is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lynx.errors import ConfigError, InfeasibleError, PlanError
from megatron_lynx.plan import parse_plan
from megatron_lynx.presets import load_cluster
from megatron_lynx.search.check import check_plan
from megatron_lynx.search.workflow import Job, make_job, plan_job
from megatron_lynx.spec import Batch, Model, Parallel
from tests.support.command import lynx
from tests.support.planted import Fault, planted

MODEL = Model(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=256,
    transformer_impl="local",
    attention="unfused",
)


def job(tp: int = 2, pp: int = 2, vpp: int = 1, layout: str | None = None, sp: bool = False) -> Job:
    """A job in which about a third of what a microbatch would keep must go."""
    free = make_job(
        MODEL,
        Parallel(tp=tp, pp=pp, vpp=vpp, sequence_parallel=sp),
        Batch(seq_length=64, micro_batch_size=2, global_batch_size=16),
        cluster=load_cluster("toy"),
        layout=layout,
        memory_bytes=None,
    )
    stages = plan_job(free, "none").row().stages
    tight = max(s.static_bytes + (s.peak_bytes - s.static_bytes) * 2 // 3 for s in stages)
    return replace(free, memory_bytes=tight)


JOB = job()
FAULTS = list(planted(JOB, plan_job(JOB, "heu").plan))


@pytest.mark.parametrize(
    "one",
    [
        JOB,
        job(sp=True),
        job(pp=1),
        job(tp=1),
        job(vpp=2),
        job(vpp=2, layout="E|tt|t|tL"),
        job(layout="Etttt|L"),
    ],
    ids=lambda one: f"{one.parallel.tp}-{one.parallel.pp}-{one.parallel.vpp} {one.layout}",
)
@pytest.mark.parametrize(
    "planner", ["heu", "windows", "full-uniform-2", "full-block-1", "selective", "adapipe"]
)
def test_what_planners_make_is_sound(one: Job, planner: str) -> None:
    try:
        plan = plan_job(one, planner).plan
    except InfeasibleError:
        plan = plan_job(replace(one, memory_bytes=1 << 40), planner).plan
    check_plan(one, parse_plan(str(plan)))


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{n} {what}" for n, (what, _, _) in enumerate(FAULTS)])
def test_every_planted_fault_is_named(fault: Fault) -> None:
    _, text, parts = fault
    with pytest.raises(PlanError) as caught:
        check_plan(JOB, parse_plan(text))
    for part in parts:
        assert part in str(caught.value)


def test_a_hundred_faults_are_planted() -> None:
    assert len(FAULTS) >= 70


def test_the_command_line_names_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.txt"
    flags = ["--cluster", "toy", "--tp", "2", "--pp", "2", "--seq-length", "64", "--micro-batch-size", "2"]
    shape = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "256"]
    flags += [*shape, "--global-batch-size", "16", "--transformer-impl", "local"]
    path.write_text(next(text for what, text, _ in FAULTS if what == "layer 77"))
    code, out, err = lynx(capsys, "explain", str(path), *flags)
    assert (code, out) == (2, "")
    assert "layer 77 is not beside it" in err


def test_a_profile_of_another_layer_says_which() -> None:
    costs = replace(JOB.costs, graph="other", job={**plan_job(JOB, "heu").plan.job, "hidden_size": 128})
    with pytest.raises(ConfigError, match="another layer shape: --hidden-size 128, this job has 64"):
        make_job(MODEL, JOB.parallel, JOB.batch, costs=costs, memory_bytes=1 << 30)
