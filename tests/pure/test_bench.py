"""The pure half of the bench: figures, the Pareto front, the plot, the page, and the JSON."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.cli.bench_plot import pareto_svg
from megatron_lynx.cli.bench_report import bench_table, cells, docs_text, findings, ordered
from megatron_lynx.cli.bench_result import (
    Case,
    Measured,
    best_stock,
    from_json,
    front,
    quartiles,
    to_json,
)
from megatron_lynx.cost import CostTable, LayerCosts
from megatron_lynx.errors import ConfigError
from megatron_lynx.presets import load_model

SECOND, MB = 1_000_000_000, 1_000_000


def row(name: str, kind: str, step_s: float, peak_mb: float, **more: Any) -> Measured:
    """A row with plausible figures."""
    values: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "steps": 3,
        "step_ns": round(step_s * SECOND),
        "low_ns": round(step_s * SECOND * 0.98),
        "high_ns": round(step_s * SECOND * 1.03),
        "peak_bytes": round(peak_mb * MB),
        "target_bytes": round(peak_mb * MB) if kind != "stock" else None,
        "predicted_step_ns": round(step_s * SECOND * 1.05),
        "predicted_peak_bytes": round(peak_mb * MB * 0.99),
        "planned_hidden_ns": 90,
        "planned_exposed_ns": 10,
        "rebuilt_in_windows": 9,
        "rebuilt_in_stalls": 0,
        "rebuilt_on_demand": 1,
    }
    return Measured(**(values | more))


MODEL = load_model("gpt-1.3b", num_layers=8, hidden_size=512, num_attention_heads=8, attention="unfused")
COSTS = LayerCosts(
    forward_ns={"linear_qkv": 3_000_000, "activation": 5_000_000, "linear_proj": 70_000_000},
    dgrad_ns={},
    wgrad_ns={"linear_fc1": 6_000_000},
    collective_ns={"bwd:linear_fc1": 10_000_000, "bwd:linear_qkv": 9_000_000},
    beside=("linear_fc1", "linear_qkv"),
    contention=1.5,
)
CASE = Case(
    name="tp2",
    link="1gbit",
    parallel={"tp": 2, "pp": 1, "vpp": 1, "dp": 1},
    model=asdict(MODEL),
    batch={"seq_length": 512, "micro_batch_size": 2, "global_batch_size": 2},
    rounds=3,
    outside_ns=1,
    costs=json.loads(CostTable(layer=COSTS).to_json()),
    rows=(
        row("none", "stock", 2.0, 100),
        row("full-uniform-1", "stock", 3.0, 30),
        row("selective", "stock", 2.5, 70),
        row("lynx 60%", "lynx", 2.05, 60),
        row("lynx 60%, windows off", "demand", 2.55, 60),
    ),
)
MACHINE = {"processor": "a core", "cores": 2, "device": "cpu", "python": "3.12", "date": "2026-01-01"}


def test_the_front_holds_what_nothing_beats() -> None:
    names = [r.name for r in front(CASE.rows)]
    assert names == ["full-uniform-1", "lynx 60%", "none"]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_every_row_is_on_the_front_or_beaten_by_one_that_is(points: list[tuple[int, int]]) -> None:
    rows = [row(str(i), "stock", step, peak) for i, (step, peak) in enumerate(points)]
    best = front(rows)
    for one in rows:
        assert (one in best) != any(other.beats(one) for other in best)
    assert all(a.step_ns >= b.step_ns for a, b in pairwise(best))


def test_a_row_does_not_beat_its_equal() -> None:
    one, other = row("a", "stock", 1, 1), row("b", "lynx", 1, 1)
    assert not one.beats(other)
    assert not other.beats(one)
    assert set(front([one, other])) == {one, other}


def test_quartiles_are_whole_and_ordered() -> None:
    assert quartiles([7]) == (7, 7, 7)
    assert quartiles([10, 20, 30, 40, 50]) == (20, 30, 40)


def test_errors_are_relative_to_what_was_measured() -> None:
    none = CASE.rows[0]
    assert none.step_error == pytest.approx(0.05)
    assert none.peak_error == pytest.approx(-0.01)
    assert replace(none, predicted_step_ns=None).step_error is None


def test_the_rival_is_the_fastest_stock_method_of_the_same_size() -> None:
    lynx = CASE.row("lynx 60%")
    assert lynx is not None
    rival = best_stock(CASE, lynx)
    assert rival is not None
    assert rival.name == "full-uniform-1"
    assert best_stock(CASE, row("small", "lynx", 1, 1)) is None


def test_hidden_share_by_the_clock() -> None:
    lynx = CASE.row("lynx 60%")
    assert lynx is not None
    assert CASE.hidden_share(lynx) == pytest.approx(0.5 / 0.55)
    assert CASE.hidden_share(CASE.rows[0]) is None


def test_json_round_trips() -> None:
    machine, cases = from_json(to_json(MACHINE, [CASE]), "bench.json")
    assert machine == MACHINE
    assert cases == (CASE,)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "machine": {}, "cases": [{}]}'])
def test_what_is_no_bench_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"bench\.json is not a bench"):
        from_json(text, "bench.json")


def test_another_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match="schema 99 is unknown; 2 works"):
        from_json('{"schema": 99}', "bench.json")


def test_the_table_lists_every_row_once_small_ones_first() -> None:
    assert bench_table(CASE).row_count == len(CASE.rows)
    assert [r.name for r in ordered(CASE)] == [
        *("full-uniform-1", "lynx 60%", "selective", "none"),
        "lynx 60%, windows off",
    ]
    first = cells(CASE, ordered(CASE)[0])
    assert first[0] == "full-uniform-1 *"
    assert "+5.0%" in first[-2]


def test_a_row_without_a_plan_says_so() -> None:
    bare = row("modules", "stock", 2, 50, predicted_step_ns=None, predicted_peak_bytes=None)
    assert cells(CASE, bare)[-2:] == ("no plan", "no plan")


def test_the_plot_is_xml_with_a_point_for_each_row() -> None:
    root = ElementTree.fromstring(pareto_svg(CASE))
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert [title.split(":")[0] for title in titles] == [r.name for r in CASE.rows]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width
        assert 0 <= float(circle.attrib["cy"]) <= height


def test_the_plot_of_equal_rows_exists() -> None:
    same = replace(CASE, rows=(row("a", "stock", 1, 1), row("b", "lynx", 1, 1)))
    assert pareto_svg(same).startswith("<svg")


def test_the_page_names_machine_link_and_every_method() -> None:
    page = docs_text(MACHINE, [CASE])
    assert "2 cores of a core" in page
    assert "## tp2, link 1gbit" in page
    for one in CASE.rows:
        assert f"| {one.name}" in page
    assert "has never been run" in page


def test_findings_compare_with_stock_and_with_windows_off() -> None:
    text = "\n".join(findings(CASE))
    full = "1.46x as fast as full recomputation (1.50x would be all of it hidden),"
    assert f"+2.5% against none, {full}" in text
    assert "its windows bring 1.24x" in text
    assert "backward hold 10 ms of work" in text  # 10 - 1.5 * 6 and 9
    assert "takes 8 ms, or 12 ms beside a collective" in text  # linear_proj needs a collective
    assert "that a stock method beats in both: none" in text
