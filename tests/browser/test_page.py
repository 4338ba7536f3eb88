"""The HTML page in headless Chromium: it draws what the simulator says, without an error, for everyone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_lynx.cli.html import plan_page, write_page
from megatron_lynx.cli.main import main
from megatron_lynx.job import Job, make_job
from megatron_lynx.plan import Plan
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.given import timeline_of
from megatron_lynx.search.workflow import plan_job
from megatron_lynx.simulator.memory import curve, peak
from megatron_lynx.spec import Batch, Parallel
from tests.support.browser import Browser, browser
from tests.support.run_folder import write_run

LAYERS = 32


def make(parallel: Parallel, microbatches: int) -> Job:
    model = replace(load_model("gpt-7b"), num_layers=LAYERS)
    batch = Batch(seq_length=2048, micro_batch_size=12, global_batch_size=12 * microbatches)
    return make_job(model, parallel, batch, cluster=load_cluster("a100-40g-nvlink"))


class Made(NamedTuple):
    """A page and what it shows."""

    path: Path
    job: Job
    plan: Plan
    data: dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def made(folder: Path, name: str, job: Job, planner: str) -> Made:
    plan = plan_job(job, planner).plan
    data = plan_page(job, planner, plan)
    path = folder / f"{name}.html"
    write_page(data, str(path))
    return Made(path, job, plan, data)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Made:
    return made(folder, "plain", make(Parallel(tp=4, pp=4), 16), "opt")


@pytest.fixture(scope="module")
def interleaved(folder: Path) -> Made:
    return made(folder, "interleaved", make(Parallel(tp=4, pp=4, vpp=2), 8), "heu")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as page:
        yield page


@pytest.fixture
def page(chromium: Browser, plain: Made) -> Browser:
    """The plain page, freshly loaded, wide, light."""
    chromium.scheme("light")
    chromium.open(plain.path)
    return chromium


def check_clean(page: Browser, path: Path) -> None:
    """The script ran to its end, nothing complained, nothing but the file was asked for."""
    assert page.evaluate("document.documentElement.dataset.ready") == "yes"
    assert page.messages == []
    assert [url for url in page.requests if not url.startswith("data:")] == [path.resolve().as_uri()]


def colors(page: Browser, selector: str) -> int:
    """Different colours in a canvas."""
    count: int = page.evaluate(
        f"""(() => {{
          const canvas = document.querySelector({json.dumps(selector)});
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return new Set(new Uint32Array(pixels.buffer)).size;
        }})()"""
    )
    return count


def focused(page: Browser) -> str:
    """The element that has the keyboard: its id, or its tag and text."""
    text: str = page.evaluate(
        "(({id, tagName, textContent}) => id || `${tagName} ${textContent}`)(document.activeElement)"
    )
    return text


def test_page_runs_without_a_complaint(page: Browser, plain: Made) -> None:
    check_clean(page, plain.path)


def test_errors_in_a_page_are_noticed(chromium: Browser, folder: Path) -> None:
    """The test above means something: a broken page does not pass it."""
    path = folder / "broken.html"
    path.write_text(
        "<!doctype html><link rel=icon href='data:,'><script>console.error('one'); two()</script>"
        "<img src='http://127.0.0.1:9/three.png'>"
    )
    chromium.open(path)
    chromium.evaluate("new Promise(done => setTimeout(done, 200))")
    assert any("one" in message for message in chromium.messages)
    assert any("two is not defined" in message for message in chromium.messages)
    assert any("three.png" in url for url in chromium.requests)


def test_a_row_for_every_stage_and_a_cell_for_every_region(page: Browser, plain: Made) -> None:
    stages = len(plain.plan.stages)
    assert page.evaluate("document.querySelectorAll('#rows .row').length") == stages
    assert page.evaluate("document.querySelectorAll('#memory .row').length") == stages
    regions = len(plain.data["regions"])
    assert page.evaluate("document.querySelectorAll('#grid tbody td').length") == LAYERS * regions
    assert page.evaluate("document.querySelectorAll('#methods tbody tr').length") == len(
        plain.data["methods"]
    )


def test_cells_tell_the_plan(page: Browser, plain: Made) -> None:
    shown = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#grid tbody tr')].map(row => "
        "[row.dataset.region, [...row.querySelectorAll('td')].map(cell => cell.dataset.choice)]))"
    )
    layers = [layer for stage in plain.plan for layer in stage.layers]
    droppable = plain.job.graph.droppable()
    for region, cells in shown.items():
        for layer, cell in zip(layers, cells, strict=True):
            choice = str(layer.choice(region)).partition(":")[0]
            assert cell == ("nothing" if choice == "keep" and region not in droppable else choice)
    assert {cell for cells in shown.values() for cell in cells} >= {"keep", "nothing", "stall"}


@pytest.mark.parametrize("name", ["plain", "interleaved"])
def test_script_agrees_with_the_simulator(
    chromium: Browser, request: pytest.FixtureRequest, name: str
) -> None:
    """Times by kind, the peak and every moment of the memory curve, for each method that fits."""
    one: Made = request.getfixturevalue(name)
    chromium.open(one.path)
    check_clean(chromium, one.path)
    timeline = timeline_of(one.job, one.plan)
    for stage in one.plan:
        totals = chromium.evaluate(f"lynx.step().totals({stage.stage})")
        assert dict(zip(one.data["kinds"], totals, strict=True)) == timeline.totals_ns(stage.stage)
        top = chromium.evaluate(f"(s => s.curve({stage.stage}).sums[s.peak({stage.stage})])(lynx.step())")
        assert top == peak(timeline, stage.stage).size_bytes
        moments = "times.map((time, i) => [time, sums[i]])"
        drawn = chromium.evaluate(f"(({{times, sums}}) => {moments})(lynx.step().curve({stage.stage}))")
        assert set(curve(timeline, stage.stage)) - {(0, 0)} <= {(at, held) for at, held in drawn}


def test_compute_spans_leave_no_gap(page: Browser) -> None:
    gaps = page.evaluate(
        """(() => {
          let bad = 0;
          lynx.step().runs.forEach((runs) => {
            let at = 0;
            const spans = runs.flatMap((run) => lynx.step().spans(run));
            spans.filter((span) => span.stream === 0).forEach((span) => {
              if (span.start !== at) bad++;
              at = span.end;
            });
          });
          return bad;
        })()"""
    )
    assert gaps == 0


def test_canvases_are_drawn(page: Browser) -> None:
    for selector in ("#overview canvas", "#rows .row canvas", "#memory .row canvas", "#axis"):
        assert colors(page, selector) > 3, selector


def test_every_method_that_fits_can_be_shown(page: Browser, plain: Made) -> None:
    for method in plain.data["methods"]:
        row = f"""document.querySelector('#methods tr[data-method="{method["name"]}"]')"""
        assert page.evaluate(f"{row}.querySelector('button').disabled") == (method["plan"] is None)
        if method["plan"] is None:
            assert page.evaluate(f"{row}.textContent").endswith(method["reason"])
            continue
        page.evaluate(f"{row}.querySelector('button').click()")
        assert page.evaluate("document.getElementById('title').textContent") == f"gpt-7b: {method['name']}"
        assert page.evaluate(f"{row}.hasAttribute('data-shown')")
    check_clean(page, plain.path)


def changed(page: Browser, expression: str, old: Any) -> Any:
    """The value of ``expression`` once it is no longer ``old``, or after ten seconds."""
    end = time.monotonic() + 10
    while (value := page.evaluate(expression)) == old and time.monotonic() < end:
        time.sleep(0.05)
    return value


def test_dark_and_light(page: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    pixel = (
        "[...document.querySelector('#rows canvas').getContext('2d').getImageData(3, 8, 1, 1).data].join()"
    )
    light = page.evaluate(background), page.evaluate(pixel)
    page.scheme("dark")
    # The canvas is drawn anew in a later frame: on a busy machine it takes its time.
    dark = changed(page, background, light[0]), changed(page, pixel, light[1])
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    # The toggle overrules what the system prefers: auto, light, dark.
    seen = []
    for _ in range(3):
        page.evaluate("document.getElementById('theme').click()")
        seen.append(
            (page.evaluate("document.getElementById('theme').textContent"), page.evaluate(background))
        )
    assert seen == [("Theme: light", light[0]), ("Theme: dark", dark[0]), ("Theme: auto", dark[0])]
    page.scheme("light")
    assert changed(page, background, dark[0]) == light[0]


def test_text_can_be_read_in_both_themes(page: Browser) -> None:
    """Contrast of text against the page, by WCAG: at least 4.5 to 1."""
    contrast = """(selector) => {
      const light = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
        .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
      const [a, b] = [getComputedStyle(document.querySelector(selector)).color,
        getComputedStyle(document.body).backgroundColor].map(light).sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05);
    }"""
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        for selector in ("h1", "#finding", ".hint", "#job", "#methods th"):
            assert page.evaluate(f"({contrast})({json.dumps(selector)})") >= 4.5, (scheme, selector)


def test_keyboard_reaches_everything(page: Browser) -> None:
    reached = []
    for _ in range(40):
        page.press("Tab")
        reached.append(focused(page))
        if reached[-1].startswith("TD"):
            break
    assert reached[0] == "theme"
    assert "BUTTON opt" in reached
    assert [
        name for name in reached if name in ("BUTTON Steady state", "BUTTON Whole step", "rows", "follow")
    ] == [*("BUTTON Steady state", "BUTTON Whole step", "rows", "follow")]
    assert reached[-1].startswith("TD")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_theme_toggles_by_keyboard(page: Browser) -> None:
    page.press("Tab")
    page.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_timeline_by_keyboard(page: Browser) -> None:
    page.evaluate("document.getElementById('rows').focus()")

    def view() -> tuple[float, float]:
        start, end = page.evaluate("[lynx.state.from, lynx.state.to]")
        return start, end

    before = view()
    page.press("+")
    zoomed = view()
    assert before[0] < zoomed[0] < zoomed[1] < before[1]
    page.press("ArrowRight")
    assert view()[0] > zoomed[0]
    page.press("ArrowDown")
    page.press("n")
    first = page.evaluate("document.getElementById('spoken').textContent")
    page.press("n")
    second = page.evaluate("document.getElementById('spoken').textContent")
    assert first.startswith("stage 1: ")
    assert first != second
    page.press("p")
    assert page.evaluate("document.getElementById('spoken').textContent") == first
    page.press("0")
    assert view() == (0, page.evaluate("lynx.step().end"))


def test_grid_by_keyboard(page: Browser, plain: Made) -> None:
    page.evaluate("document.querySelector('#grid tbody td').focus()")
    page.press("ArrowRight")
    page.press("ArrowDown")
    note = page.evaluate("document.getElementById('cell-note').textContent")
    assert note.startswith(f"layer 1, {plain.data['regions'][1]}: ")
    for _ in range(3):
        page.press("ArrowUp")  # stops at the edge
    assert page.evaluate("document.activeElement.tagName") == "TD"


def test_pointer_shows_what_is_there(page: Browser) -> None:
    page.evaluate("document.querySelector('#rows').scrollIntoView()")
    for selector, expected in (("#rows .row canvas", "microbatch"), ("#memory .row canvas", "static")):
        page.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = page.evaluate(
            f"(({{x, y, width}}) => [x, y, width])(document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect())"
        )
        page.mouse("mouseMoved", box[0] + box[2] * 0.4, box[1] + 12)
        assert not page.evaluate("document.getElementById('tip').hidden")
        assert expected in page.evaluate("document.getElementById('tip').textContent")


def test_pointer_drags_and_zooms(page: Browser) -> None:
    page.evaluate("document.querySelector('#rows').scrollIntoView({block: 'center'})")
    x, y = page.evaluate(
        "(({x, y}) => [x + 400, y + 12])(document.querySelector('#rows canvas').getBoundingClientRect())"
    )
    before = page.evaluate("lynx.state.from")
    page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    assert page.evaluate("lynx.state.from") > before
    length = page.evaluate("lynx.state.to - lynx.state.from")
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120, modifiers=2)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate("lynx.state.to - lynx.state.from") < length


@pytest.mark.parametrize("width", [390, 768, 1320, 2200])
def test_page_fits_its_window(chromium: Browser, plain: Made, width: int) -> None:
    chromium.open(plain.path, width)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate("document.querySelector('#rows canvas').clientWidth") > width / 2 or width > 1320


def test_report_of_a_run_opens_in_the_same_page(chromium: Browser, plain: Made, folder: Path) -> None:
    run = folder / "run"
    write_run(run, plain.job, plain.plan)
    path = run / "page.html"
    assert main(["report", str(run), "--html", str(path)]) == 0
    chromium.open(path)
    check_clean(chromium, path)
    assert chromium.evaluate("document.querySelectorAll('[data-measured]').length") == 4
    text = chromium.evaluate("document.getElementById('measured').textContent")
    assert "planned" in text
    assert "measured" in text
    windows = sum(len({(w.kind, w.slot) for w in stage.windows()}) + 1 for stage in plain.plan)
    assert chromium.evaluate("document.querySelectorAll('.pair tbody').length") == windows + 4 * 4
    assert chromium.evaluate("document.querySelectorAll('#rows .row').length") == 4


def test_page_without_measurements_hides_that_part(page: Browser) -> None:
    assert page.evaluate("document.getElementById('measured-section').hidden")
