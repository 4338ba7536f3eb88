"""The ``lynx`` command: output that people and machines read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lynx.cli.docs import Setting, write_comparison
from megatron_lynx.cli.main import COMMANDS
from megatron_lynx.cli.report import grid
from megatron_lynx.plan import parse_plan
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.throughput import model_flops
from megatron_lynx.spec import Batch, Parallel
from tests.support.command import SMALL, TIGHT, Captured, lynx


def test_plan_prints_a_table_and_writes_the_plan(capsys: Captured, tmp_path: Path) -> None:
    for name in ("plan.txt", "plan.json"):
        file = tmp_path / name
        code, out, err = lynx(capsys, "plan", *TIGHT, "--planner", "heu", "--output", str(file))
        assert (code, err) == (0, "")
        assert "stage" in out
        assert f"plan written to {file}" in out.replace("\n", "")
        plan = parse_plan(file.read_text("utf-8"))
        assert plan.planner == "heu"
        assert file.read_text("utf-8").startswith("{") == name.endswith("json")


ROW_FIELDS = {
    "method": str,
    "planner": str,
    "fits": bool,
    "reason": str | None,
    "iteration_ns": int | None,
    "stage": int | None,
    "needed_bytes": int | None,
    "tokens_per_second": float | None,
    "tflops_per_gpu": float | None,
    "mfu": float | None,
    "host_bound": bool,
    "layout": str | None,
    "stages": list,
}
STAGE_FIELDS = {
    "stage",
    "layers",
    "in_flight",
    "static_bytes",
    "kept_bytes",
    "rebuilt_bytes",
    "peak_bytes",
    "forward_ns",
    "backward_ns",
    "recompute_hidden_ns",
    "recompute_exposed_ns",
    "parameters",
}


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_json_is_as_the_design_says(capsys: Captured, command: str) -> None:
    code, out, err = lynx(capsys, command, *TIGHT, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert set(data) == {"schema", "model", "parallel", "batch", "cluster", "rows"}
    assert data["schema"] == 1
    assert len(data["rows"]) == (1 if command == "plan" else 16)
    for row in data["rows"]:
        assert set(row) == set(ROW_FIELDS)
        assert all(isinstance(row[name], kind) for name, kind in ROW_FIELDS.items())
        for stage in row["stages"]:
            assert set(stage) == STAGE_FIELDS
            assert all(isinstance(value, int) for name, value in stage.items() if name != "layers")
        if row["fits"]:
            assert sorted(k for stage in row["stages"] for k in stage["layers"]) == list(range(8))


def test_compare_shows_both_speedups(capsys: Captured) -> None:
    code, out, _ = lynx(capsys, "compare", *TIGHT)
    assert code == 0
    for word in ("Megatron", "checkmate", "full-block", "opt + search", "does not fit", "MFU", "tokens/s"):
        assert word in out


def test_explain_says_what_is_dropped_and_where_memory_goes(capsys: Captured, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.txt")
    lynx(capsys, "plan", *TIGHT, "--planner", "heu", "--output", file)
    code, out, err = lynx(capsys, "explain", file)
    assert (code, err) == (0, "")
    assert "rebuilt in" in out
    assert "--from-args" in out
    code, out, _ = lynx(capsys, "explain", file, *TIGHT)
    assert code == 0
    for word in ("weights", "optimizer", "kept", "backward workspace", "peak", "free"):
        assert word in out
    code, out, _ = lynx(capsys, "explain", file, *TIGHT, "--json")
    stage = json.loads(out)["stages"][0]
    assert {"groups", "static", "peak", "chunks", "layers"} <= set(stage)
    assert sum(stage["peak"]["owners"].values()) == stage["peak"]["size_bytes"]


def test_explain_refuses_a_plan_of_another_job(capsys: Captured, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.txt")
    lynx(capsys, "plan", *TIGHT, "--planner", "heu", "--output", file)
    code, _, err = lynx(capsys, "explain", file, *TIGHT, "--micro-batch-size", "8")
    assert code == 2
    assert "made for another job" in err


def test_simulate_writes_a_trace(capsys: Captured, tmp_path: Path) -> None:
    plan, trace = str(tmp_path / "plan.txt"), tmp_path / "trace.json"
    lynx(capsys, "plan", *TIGHT, "--planner", "heu", "--output", plan)
    code, out, _ = lynx(capsys, "simulate", plan, *TIGHT, "--trace", str(trace))
    assert code == 0
    assert "idle" in out
    events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    code, out, _ = lynx(capsys, "simulate", *TIGHT, "--planner", "heu", "--json")
    data = json.loads(out)
    assert data["planner"] == "heu"
    compute = ("forward", "backward", "recompute-hidden", "recompute-stall", "recompute-exposed")
    for stage in data["stages"]:
        busy = sum(stage["totals_ns"][kind] for kind in (*compute, "wait", "idle"))
        assert busy == data["makespan_ns"]


def test_a_run_file_is_a_whole_job(capsys: Captured, tmp_path: Path) -> None:
    code, out, _ = lynx(capsys, "plan", "--run", "gpt-1.3b-toy", "--json")
    assert code == 0
    data = json.loads(out)
    assert (data["model"]["name"], data["cluster"]["name"]) == ("gpt-1.3b", "toy")
    code, out, _ = lynx(capsys, "plan", "--run", "gpt-1.3b-toy", "--tp", "4", "--json")
    assert json.loads(out)["parallel"]["tp"] == 4
    file = tmp_path / "mine.toml"
    file.write_text('model = "gpt-7b"\nmicro_batches = 3\n', "utf-8")
    code, _, err = lynx(capsys, "plan", "--run", str(file))
    assert code == 2
    assert "'micro_batches' is not a flag of a job" in err


def test_a_measured_profile_replaces_estimates(capsys: Captured, tmp_path: Path) -> None:
    from megatron_lynx.estimate import estimate_costs

    model = load_model("gpt-1.3b", num_layers=8, transformer_impl="transformer_engine")
    batch = Batch(seq_length=2048, micro_batch_size=1, global_batch_size=16)
    costs = estimate_costs(model, Parallel(tp=2, pp=4), batch, load_cluster("toy"))
    file = tmp_path / "costs.json"
    file.write_text(costs.to_json(), "utf-8")
    code, out, _ = lynx(capsys, "plan", *SMALL, "--profile", str(file), "--json")
    assert code == 0
    assert json.loads(out)["cluster"]["costs"] == "estimate toy"
    code, _, err = lynx(capsys, "plan", *SMALL, "--micro-batch-size", "2", "--profile", str(file))
    assert code == 2
    assert "measured for another layer shape" in err


def test_help_and_version(capsys: Captured) -> None:
    code, out, _ = lynx(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)
    code, out, _ = lynx(capsys, "--version")
    assert code == 0
    assert out.startswith("lynx ")
    assert "0.17.1, 0.18.2" in out  # and which Megatron is here, if any
    code, out, _ = lynx(capsys)
    assert code == 2
    for name in ("plan", "compare", "explain", "simulate"):
        code, out, _ = lynx(capsys, name, "--help")
        assert code == 0
        assert "--from-args" in out


def test_the_comparison_document(tmp_path: Path) -> None:
    file = tmp_path / "docs" / "comparison.md"
    write_comparison(str(file), settings=[Setting("gpt-1.3b", 2, 4, 16)])
    text = file.read_text("utf-8")
    assert text.count("| gpt-1.3b |") == 2
    for word in ("simulated", "over checkmate", "a100-40g-pcie", "opt + search"):
        assert word in text


def test_tables_fit_eighty_columns_and_cut_nothing(capsys: Captured, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.txt")
    wide = ("--model", "gpt-1.3b", "--tp", "2", "--pp", "12", "--micro-batch-size", "16")
    outs = [lynx(capsys, "plan", *wide, "--planner", "heu", "--output", plan)[1]]
    outs += [lynx(capsys, "explain", plan, *wide)[1], lynx(capsys, "simulate", plan, *wide)[1]]
    outs += [lynx(capsys, "compare", *TIGHT)[1]]
    for out in outs:
        assert "…" not in out
        flags = ("written to", "flags:", "best:", "fastest:", "--", str(tmp_path))
        lines = [line for line in out.splitlines() if not any(word in line for word in flags)]
        assert max(map(len, lines)) <= 80
    heads = outs[0].split("step ")[0]
    assert all(
        name in heads for name in ("static", "kept", "rebuilt", "peak", "free", "forward", "on demand")
    )


def test_a_grid_keeps_every_cell() -> None:
    rows = [(f"row {i}", *(str(i * 10**k) for k in range(12))) for i in range(3)]
    text = grid("title", ["name", *(f"column\n{k}" for k in range(12))], rows, 40)
    assert max(map(len, text.splitlines())) <= 40
    assert all(cell in text for row in rows for cell in row)
    assert text.count("row 2") > 1


def test_plain_statements(capsys: Captured) -> None:
    _, out, _ = lynx(capsys, "plan", *TIGHT, "--planner", "heu")
    assert "flags: --recompute-method lynx --lynx-planner heu --lynx-budget" in out
    job = ("--model", "gpt-1.3b", "--num-layers", "8", "--tp", "2", "--pp", "4", "--global-batch-size", "8")
    _, out, _ = lynx(capsys, "plan", *job, "--planner", "heu")
    assert "Everything fits; use no recomputation." in out
    _, out, _ = lynx(capsys, "compare", *job)
    assert "Everything fits; use no recomputation." in out
    assert "Megatron's best: none: no recomputation flag at all" in out
    assert "assumed: transformer_engine layers, flash attention" in out
    _, out, _ = lynx(capsys, "compare", *TIGHT, "--budget", "1GiB")
    assert "Nothing fits 1.00 GiB. With full recomputation stage" in out
    assert "would help most" in out
    assert "optimizer" in out
    _, out, _ = lynx(capsys, "compare", *TIGHT)
    assert "--recompute-granularity full" in out
    assert "--recompute-method lynx --lynx-planner" in out


def test_a_plan_for_more_memory_is_no_success(capsys: Captured, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.txt")
    lynx(capsys, "plan", *TIGHT, "--planner", "none", "--budget", "30GiB", "--output", plan)
    for command in ("explain", "simulate"):
        code, out, err = lynx(capsys, command, plan, *TIGHT)
        assert code == 2
        assert "peak" in out
        assert "the plan needs" in err
        code, _, err = lynx(capsys, command, plan, *TIGHT, "--budget", "30GiB")
        assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("where", "message"),
    [("> /dev/full", "No space left on device"), (">&-", "standard output is closed"), ("| true", "")],
)
def test_output_that_cannot_be_written(where: str, message: str) -> None:
    words = f"{sys.executable} -m megatron_lynx plan --model gpt-1.3b --planner none --tp 2 --json {where}"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words}"], cwd=root, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in ((0, 130) if not message else (2,))
    assert message in done.stderr


def test_model_flops_are_megatrons() -> None:
    """``num_floating_point_operations`` of Megatron-Core 0.19 for a GPT of 24 layers, computed by hand."""
    model = load_model("gpt-1.3b")
    batch = Batch(seq_length=2048, micro_batch_size=1, global_batch_size=4)
    h, tokens = model.hidden_size, 4 * 2048
    layer = 12 * h * h + 2048 * h
    vocabulary = -(-model.vocab_size // 128) * 128
    expected = 6 * tokens * (model.num_layers * layer + h * vocabulary)
    assert model_flops(model, Parallel(), batch) == expected
