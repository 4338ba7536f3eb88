"""Timelines kept as text: every run, the totals and the peaks of small jobs, to the nanosecond.

After a change that is meant to move them, run with ``LYNX_WRITE_GOLDENS=1`` and read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_lynx.simulator import memory
from megatron_lynx.simulator.engine import SimJob, simulate
from megatron_lynx.spec import Parallel
from tests.pure.simulator.jobs import FORWARD, job_of, table_of

GOLDEN = Path(__file__).parents[2] / "golden" / "timelines"

TWO, FOUR = Parallel(tp=2, pp=2), Parallel(tp=2, pp=4)
MIXED = {
    "input_layernorm": "fwd:K:linear_proj",
    "core_attention": "stall",
    "self_attn_dropout": "demand",
    "pre_mlp_layernorm": "bwd:K:linear_fc1",
    "activation": "demand",
}

JOBS: dict[str, SimJob] = {
    "none_pp4_m6": job_of(FOUR, 6, table=table_of(FOUR, p2p=10)),
    "full_pp2_m3": job_of(TWO, 3, dict.fromkeys(FORWARD, "demand")),
    "mixed_pp2_m4": job_of(TWO, 4, MIXED, table=table_of(TWO, p2p=10, contention=1.25), workspace=(500, 800)),
    "mixed_pp1_m2": job_of(Parallel(tp=2), 2, MIXED),
    "mixed_pp2_vpp2_m4": job_of(
        Parallel(tp=2, pp=2, vpp=2), 4, MIXED, table=table_of(Parallel(tp=2, pp=2, vpp=2), p2p=10)
    ),
    "uneven_sp_pp3_m4": job_of(
        Parallel(tp=2, pp=3, sequence_parallel=True),
        4,
        MIXED,
        counts=[3, 2, 1],
        table=table_of(Parallel(tp=2, pp=3, sequence_parallel=True), wait=30),
    ),
}


def text_of(job: SimJob) -> str:
    """What the golden file holds."""
    timeline = simulate(job)
    lines = [str(timeline)]
    for stage in range(job.parallel.pp):
        times = (f"{kind} {time}" for kind, time in timeline.totals_ns(stage).items() if time)
        lines.append(f"stage {stage} ns: {', '.join(times)}\n")
        lines.append(f"{memory.peak(timeline, stage)}\n")
    passes = [span for span in timeline.spans(0) if str(span.action) == "B0.0"]
    lines += [f"{s.stream:<7} {s.kind:<17} {s.start_ns:>6} {s.end_ns:>6} {s.label}\n" for s in passes]
    return "".join(lines)


@pytest.mark.parametrize("name", JOBS)
def test_timelines_equal_their_goldens(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("LYNX_WRITE_GOLDENS") == "1":
        path.write_text(text_of(JOBS[name]))
    assert text_of(JOBS[name]) == path.read_text()


def test_no_golden_is_left_behind() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(JOBS)
