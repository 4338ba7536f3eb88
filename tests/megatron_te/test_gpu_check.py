"""The check for GPUs, rehearsed on a CPU over the reference of Transformer Engine's kernels."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.test_gpu import checked, faults
from tests.support import te_reference


def test_the_gpu_check_finds_no_fault_on_a_cpu(tmp_path: Path) -> None:
    environment = te_reference.environment() | {"MEGATRON_LYNX_CPU": "1", "OMP_NUM_THREADS": "1"}
    rows = checked(tmp_path, "--tiny", **environment)
    assert list(faults(rows)) == []
    assert {"local", "local, gradients reduced beside"} <= set(rows)
    for plans in rows.values():
        assert plans["stock"]["losses"][-1] < plans["stock"]["losses"][0]
        assert plans["full-uniform-1"]["rebuilt_on_demand_ns"] > 0
        assert plans["full-uniform-1"]["kept_bytes"] < plans["selective"]["kept_bytes"]
