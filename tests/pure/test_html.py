"""The HTML page and ``lynx report`` without a browser: what is in the file, and what is refused."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.cli.html import MOVABLE, SCRIPTS, methods_of, page, plan_page
from megatron_lynx.cli.html_data import Method, page_data
from megatron_lynx.cli.main import main
from megatron_lynx.job import Job, make_job
from megatron_lynx.plan import parse_plan
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.given import timeline_of
from megatron_lynx.search.workflow import METHODS, method_of, plan_job
from megatron_lynx.simulator import passes as kinds
from megatron_lynx.spec import Batch, Parallel
from tests.support.run_folder import DEMAND_NS, RUN, STEP_NS, STEPS, WAIT_NS, WORK_NS, write_run

Captured = pytest.CaptureFixture[str]


def job(
    pp: int = 4, microbatches: int = 8, layers: int = 8, memory_bytes: int | None = None, vpp: int = 1
) -> Job:
    model = replace(load_model("gpt-7b"), num_layers=layers)
    batch = Batch(seq_length=2048, micro_batch_size=12, global_batch_size=12 * microbatches)
    cluster = load_cluster("a100-40g-nvlink")
    return make_job(model, Parallel(tp=4, pp=pp, vpp=vpp), batch, cluster=cluster, memory_bytes=memory_bytes)


def embedded(text: str) -> dict[str, Any]:
    """The data inside a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def test_page_loads_nothing() -> None:
    one = job()
    text = page(plan_page(one, "heu", plan_job(one, "heu").plan))
    assert "default-src 'none'" in text
    assert not re.findall(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}|@import|url\(|src=""", text)
    assert text.count("<script") == 2
    assert text.count("<script type=") == 1
    assert "{{" not in text


def test_data_in_the_page_is_the_data() -> None:
    one = job()
    data = plan_page(one, "heu", plan_job(one, "heu").plan)
    assert embedded(page(data)) == json.loads(json.dumps(data))
    assert [method["name"] for method in data["methods"]].count("heu") == 1
    assert len(data["methods"]) == len(METHODS)


def test_names_cannot_break_out_of_the_page() -> None:
    name = "</script><script>alert(1)</script>"
    data = page_data(name, job(), [Method(name=name, reason="none")])
    text = page(data)
    assert "<script>alert" not in text
    assert embedded(text)["title"] == name


def test_grid_has_every_layer_and_region_of_the_plan() -> None:
    one = job()
    plan = plan_job(one, "full-uniform").plan
    grid = page_data("x", one, [Method(name="x", plan=plan, timeline=timeline_of(one, plan))])
    entries = [entry for stage in grid["methods"][0]["plan"]["stages"] for entry in stage["layers"]]
    assert [entry["layer"] for entry in entries] == list(range(8))
    for entry, layer in zip(entries, (layer for stage in plan for layer in stage.layers), strict=True):
        found = {region: one["choice"] for region, one in entry["choices"].items()}
        assert found == {region: str(choice) for region, choice in layer.choices}
        assert set(found) <= set(grid["regions"])
    assert len(grid["regions"]) == len(set(grid["regions"]))


def test_timeline_is_complete_and_shares_its_passes() -> None:
    one = job(microbatches=32)
    plan = plan_job(one, "opt").plan
    timeline = timeline_of(one, plan)
    method = page_data("x", one, [Method(name="x", plan=plan, timeline=timeline)])["methods"][0]
    assert [len(rank) for rank in method["timeline"]["runs"]] == [64] * 4
    assert len(method["timeline"]["passes"]) <= 4 * 4
    for stage in method["stages"]:
        times = stage["totals_ns"]
        compute = [time for kind, time in times.items() if kind not in (kinds.COLLECTIVE, kinds.P2P)]
        assert sum(compute) == timeline.makespan_ns
        assert stage["peak"]["size_bytes"] <= one.memory_bytes
        assert sum(stage["peak"]["owners"].values()) + stage["static_bytes"] == stage["peak"]["size_bytes"]


@pytest.mark.parametrize("vpp", [1, 2])
def test_rows_tell_every_run(vpp: int) -> None:
    """As the page's script reads them."""
    one = job(microbatches=32, layers=8, vpp=vpp)
    plan = plan_job(one, "opt").plan
    timeline = timeline_of(one, plan)
    told = page_data("x", one, [Method(name="x", plan=plan, timeline=timeline)])["methods"][0]["timeline"]
    for rank, places in zip(timeline.runs, told["runs"], strict=True):
        end, last = 0, dict[tuple[int, int], int]()
        for run, place in zip(rank, places, strict=True):
            forward, chunk, since, inside, wait, hidden, delay = told["rows"][place]
            last[forward, chunk] = last.get((forward, chunk), -1) + since
            early, body, *_ = told["passes"][inside]
            assert (run.action.forward, run.action.chunk) == (bool(forward), chunk)
            assert run.action.microbatch == last[forward, chunk]
            assert (run.start_ns, run.ready_ns, run.begin_ns) == (end, end + early, end + early + wait)
            assert run.end_ns == (end := run.begin_ns + body)
            assert min(max(run.arrival_ns, run.start_ns), run.ready_ns) == run.start_ns + hidden
            assert (run.delivered_ns, run.sent_ns) == (
                end + delay,
                end + delay - told["p2p_ns"] * (delay > 0),
            )


def test_large_job_makes_a_small_page() -> None:
    """A method's runs take little beside what happens inside a pass, however many microbatches there are."""
    one = job(pp=8, microbatches=64, layers=32)
    assert len(page(plan_page(one, "heu", plan_job(one, "heu").plan))) < 1_500_000
    many = job(pp=8, microbatches=512, layers=32)
    plan = plan_job(many, "heu").plan
    method = Method(name="x", plan=plan, timeline=timeline_of(many, plan))
    told = page_data("x", many, [method])["methods"][0]["timeline"]
    assert len(told["rows"]) < 1000
    assert len(json.dumps(told["runs"], separators=(",", ":"))) < 40_000


def test_methods_that_do_not_fit_say_why() -> None:
    methods = methods_of(job(layers=32))
    assert {method_of(method.name) for method in methods} == set(METHODS)
    assert all((method.plan is None) == (method.reason is not None) for method in methods)
    assert any(method.reason and "--budget" in method.reason for method in methods)


SMALL = ("--model", "gpt-1.3b", "--num-layers", "8", "--tp", "2", "--pp", "4", "--cluster", "toy")


def test_simulate_writes_a_page(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main(["simulate", *SMALL, "--planner", "heu", "--html", str(file)]) == 0
    assert f"page written to {file}" in capsys.readouterr().out.replace("\n", "")
    data = embedded(file.read_text("utf-8"))
    assert (data["methods"][0]["name"], len(data["methods"][0]["stages"])) == ("heu", 4)


def test_compare_writes_a_page_that_begins_with_the_fastest(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main(["compare", *SMALL, "--html", str(file)]) == 0
    assert f"page written to {file}" in capsys.readouterr().out.replace("\n", "")
    data = embedded(file.read_text("utf-8"))
    names = [method["name"] for method in data["methods"]]
    assert names[-len(MOVABLE) :] == [f"{name} + search" for name in MOVABLE]
    times = [method["iteration_ns"] for method in data["methods"] if method["fits"]]
    assert data["methods"][data["shown"]]["iteration_ns"] == min(times)


def test_page_that_cannot_be_written_is_refused(capsys: Captured, tmp_path: Path) -> None:
    assert main(["simulate", *SMALL, "--planner", "heu", "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "--html page.html works" in capsys.readouterr().err


# lynx report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    one = job(layers=32)
    write_run(tmp_path, one, plan_job(one, "heu").plan)
    return tmp_path


def report(capsys: Captured, *words: str) -> dict[str, Any]:
    assert main(["report", *words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_report_sets_planned_beside_measured(capsys: Captured, run: Path) -> None:
    found = report(capsys, str(run))
    one = job(layers=32)
    plan = parse_plan((run / "plan.txt").read_text())
    timeline = timeline_of(one, plan)
    assert [stage["stage"] for stage in found["stages"]] == [0, 1, 2, 3]
    for stage, own in zip(found["stages"], plan, strict=True):
        sums = {row["name"]: row for row in stage["sums"]}
        assert sums["schedule"] | {"planned": timeline.makespan_ns, "measured": STEP_NS} == sums["schedule"]
        work = WORK_NS * one.microbatches * len(own.windows())
        assert sums["rebuilt in windows"]["measured"] == work
        assert sums["rebuilt on demand"]["measured"] == DEMAND_NS * len(own.layers)
        assert sums["kept by a microbatch"]["measured"] == 1024 * len(own.layers)
        rows = {row["name"]: row for row in stage["windows"]}
        assert set(rows) == {f"{w.kind} {w.slot}".strip() for w in own.windows()} | {"head"}
        for name, row in rows.items():
            expected = (None, WAIT_NS, None) if name == "head" else (WORK_NS, WAIT_NS, 64)
            assert tuple(row["measured"][key] for key in ("work_ns", "wait_ns", "bytes")) == expected
        head = rows["head"]["planned"]
        assert (head["opened"], head["work_ns"], head["wait_ns"]) == (0, 0, one.costs.head_window_ns)


def test_report_leaves_out_as_many_steps_as_asked(capsys: Captured, run: Path) -> None:
    slow = report(capsys, str(run), "--skip", "0")["stages"][0]["windows"][0]["measured"]["work_ns"]
    assert slow == WORK_NS * (10 + 1 + 1) // 3
    # Where all would be left out, all count.
    assert report(capsys, str(run), "--skip", "9")["stages"][0]["sums"][0]["measured"] == STEP_NS


def test_report_prints_a_table_and_writes_a_page(capsys: Captured, run: Path) -> None:
    assert main(["report", str(run), "--html", str(run / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "planned | measured" in out
    assert "5.00 ms" in out
    data = embedded((run / "page.html").read_text("utf-8"))
    assert len(data["measured"]["stages"]) == 4
    assert data["methods"][0]["name"] == "heu (this run)"


def test_plan_without_costs_is_priced_on_request(capsys: Captured, run: Path) -> None:
    before = report(capsys, str(run))
    costs = (run / "costs.json").rename(run / "mine.json")
    assert main(["report", str(run)]) == 2
    assert "--profile FILE or --cluster NAME" in capsys.readouterr().err
    assert report(capsys, str(run), "--profile", str(costs)) == before
    assert report(capsys, str(run), "--cluster", "a100-40g-nvlink") == before


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("job.json", '{"schema": 1}', "schema 1 is unknown; 3 works"),
        ("job.json", '{"schema": 3}', "is not a job"),
        ("job.json", None, "job.json does not fit"),
        ("plan.txt", None, "cannot be read"),
        ("steps.0.jsonl", "{}\n", "steps.0.jsonl does not fit"),
        ("costs.json", "[]", "is not a table of costs"),
    ],
)
def test_folder_that_does_not_fit_is_refused(
    capsys: Captured, run: Path, file: str, text: str | None, says: str
) -> None:
    if text is None:
        (run / file).unlink()
    else:
        (run / file).write_text(text)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_folder_without_steps_is_refused(capsys: Captured, run: Path) -> None:
    for path in run.glob("steps.*"):
        path.unlink()
    assert main(["report", str(run)]) == 2
    assert "holds no steps" in capsys.readouterr().err
    assert main(["report", str(run / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_report_of_a_job_that_was_started_again(capsys: Captured, run: Path) -> None:
    """The last run counts, an earlier one is there by name; a rank that wrote nothing is named."""
    later, before = "20261130T130000.000000", report(capsys, str(run))
    (run / "earlier" / RUN).mkdir(parents=True)
    for name in ("job.json", "plan.txt", "costs.json"):
        text = (run / name).read_text()
        (run / "earlier" / RUN / name).write_text(text)
        (run / name).write_text(text.replace(RUN, later))
    for path in run.glob("steps.*.jsonl"):
        lines = path.read_text().splitlines()[:STEPS]
        again = [line.replace(RUN, later).replace('"iteration": 10', '"iteration": 90') for line in lines]
        path.write_text("\n".join([*lines, *again]) + "\n")
    found = report(capsys, str(run))
    assert (found["run"], found["runs"]) == (later, [RUN, later])
    assert found["iterations"] == [901, 903]
    assert report(capsys, str(run), "--run", RUN) == before | {"runs": [RUN, later]}
    assert main(["report", str(run), "--run", "mine"]) == 2
    assert f"{RUN}, {later} works" in capsys.readouterr().err
    (run / "steps.2.jsonl").unlink()
    lines = (run / "steps.3.jsonl").read_text().splitlines(keepends=True)
    (run / "steps.3.jsonl").write_text("".join(lines[:-1]))
    assert report(capsys, str(run))["missing_ranks"] == [2]
    assert main(["report", str(run)]) == 0
    notes = capsys.readouterr().err
    assert "steps.2.jsonl has no step of this run" in notes
    assert "ranks 0, 1 made more steps than others" in notes


ROOT = Path(__file__).parents[2]


def test_a_wheel_takes_all_files_along() -> None:
    """Each file of the package that is no Python matches a pattern of the package data."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    patterns = [one.rpartition("/")[2] for places in data.values() for one in places]
    others = [
        p.name for p in (ROOT / "megatron_lynx").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    ]
    assert not [n for n in others if not n.endswith(".py") and not any(fnmatch(n, one) for one in patterns)]


def test_scripts_are_short() -> None:
    folder = ROOT / "megatron_lynx" / "cli" / "assets"
    assert {path.name for path in folder.iterdir()} == {
        *SCRIPTS,
        *("page.html", "page.css", "tune.html", "tune.css", "tune.js"),
    }
    assert all(len(path.read_text("utf-8").splitlines()) <= 400 for path in folder.iterdir())
