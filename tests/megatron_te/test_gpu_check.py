"""The check for GPUs, rehearsed on a CPU over the reference of Transformer Engine's kernels."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.test_gpu import checked, faults
from tests.support import te_reference

JOBS = {"local", "local, gradients reduced beside", "TE fused", "TE flash llama"}


def test_the_gpu_check_finds_no_fault_on_a_cpu(tmp_path: Path) -> None:
    environment = te_reference.environment() | {"MEGATRON_LYNX_CPU": "1", "OMP_NUM_THREADS": "1"}
    rows = checked(tmp_path, "--tiny", "--jobs", ";".join(JOBS), **environment)
    assert list(faults(rows)) == []
    assert {"local", "local, gradients reduced beside"} <= set(rows) <= JOBS
    for plans in rows.values():
        assert not any(row["error"] for row in plans.values())
        assert plans["stock"]["losses"][-1] < plans["stock"]["losses"][0]
        assert plans["full-uniform-1"]["rebuilt_on_demand_ns"] > 0
        assert 0 < plans["full-uniform-1"]["kept_bytes"] < plans["selective"]["kept_bytes"]
