"""The page of ``lynx tune`` in headless Chromium, with 5,000 points: drawn, filtered, read aloud."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lynx.cli.html import page as page_text
from megatron_lynx.cli.tune_page import SCRIPTS, tune_data
from megatron_lynx.presets import load_cluster
from megatron_lynx.search.space import Question
from megatron_lynx.search.tune import Limits, tune
from megatron_lynx.spec import Model
from tests.support.browser import Browser, browser

POINTS = 5000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small search's page, its points repeated with other figures."""
    model = Model(num_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=2048)
    question = Question(
        model=model, cluster=load_cluster("toy"), devices=2, seq_length=256, global_batch_size=8
    )
    data = tune_data([tune(question, limits=Limits(top=5))])
    base = data["points"]
    data["points"] = [
        {
            **base[number % len(base)],
            "name": f"point {number}",
            "step_ns": base[0]["step_ns"] + number * 1000,
            "peak_bytes": base[0]["peak_bytes"] + (number * 7919 % POINTS) * 1000,
        }
        for number in range(POINTS)
    ]
    path = tmp_path_factory.mktemp("tune") / "tune.html"
    path.write_text(page_text(data, "tune.html", ("page.css", "tune.css"), SCRIPTS), "utf-8")
    return path


@pytest.fixture
def page(chromium: Browser, path: Path) -> Browser:
    chromium.scheme("light")
    chromium.open(path)
    return chromium


def test_the_page_draws_without_a_complaint_and_asks_for_nothing(page: Browser, path: Path) -> None:
    assert page.evaluate("document.documentElement.dataset.ready") == "yes"
    assert page.messages == []
    assert [url for url in page.requests if not url.startswith("data:")] == [path.resolve().as_uri()]
    assert page.evaluate("places.length") == POINTS
    colors = page.evaluate(
        """(() => {
          const canvas = document.querySelector("#plot canvas");
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return new Set(new Uint32Array(pixels.buffer)).size;
        })()"""
    )
    assert colors > 5


def test_filters_narrow_plot_table_and_count(page: Browser) -> None:
    wanted = page.evaluate("points.filter((point) => point.side === 'megatron').length")
    page.evaluate(
        """(() => {
          const select = document.getElementById("filter-side");
          select.value = [...select.options].find((one) => one.textContent.includes("own")).value;
          select.dispatchEvent(new Event("change"));
        })()"""
    )
    assert 0 < wanted < POINTS
    assert page.evaluate("places.length") == wanted
    assert page.evaluate("document.getElementById('count').textContent").startswith(f"{wanted} of {POINTS}")
    assert page.evaluate("document.querySelectorAll('#fastest tbody tr').length") == 50


def test_the_keyboard_reaches_every_point_and_says_what_it_is(page: Browser) -> None:
    page.evaluate("document.getElementById('plot').focus()")
    assert page.evaluate("document.getElementById('spoken').textContent").startswith("point 0,")
    page.press("ArrowRight")
    spoken = page.evaluate("document.getElementById('spoken').textContent")
    assert spoken.startswith("point 1,")
    assert "peak" in spoken
    page.press("ArrowLeft")
    assert page.evaluate("document.getElementById('spoken').textContent").startswith("point 0,")


def test_controls_have_names_and_changes_are_announced(page: Browser) -> None:
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, select, [tabindex]")].filter(
          (one) => !(one.textContent.trim() || one.ariaLabel || one.getAttribute("aria-labelledby"))
        ).length"""
    )
    assert unnamed == 0
    assert page.evaluate("document.querySelectorAll('select:not([aria-label])').length") == 0
    assert page.evaluate("document.getElementById('spoken').getAttribute('aria-live')") == "polite"
    assert page.evaluate("document.getElementById('plot').getAttribute('role')") == "group"
