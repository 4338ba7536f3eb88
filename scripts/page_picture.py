"""Makes the pictures in docs/images: the page of GPT-7B, light and dark.

    python scripts/page_picture.py

Needs Chromium; looks best where Inter and TeX Gyre Pagella are installed (Debian: fonts-inter fonts-texgyre).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the browser's driver is one of the tests' helpers

from megatron_lynx.cli.main import main as lynx  # noqa: E402
from tests.support.browser import browser  # noqa: E402

JOB = (
    *("--model", "gpt-7b", "--cluster", "a100-40g-nvlink", "--tp", "4", "--pp", "4"),
    *("--micro-batch-size", "12", "--global-batch-size", "192", "--planner", "opt", "--partition", "search"),
)
WIDTH = 1320
PICTURES = {"light": "gpt-7b.png", "dark": "gpt-7b-dark.png"}


def main() -> int:
    """Plan, make the page, take its picture."""
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        path = Path(folder) / "page.html"
        code = lynx(["simulate", *JOB, "--html", str(path)])
        for scheme, name in PICTURES.items():
            page.scheme(scheme)
            page.open(path, WIDTH)
            page.size(WIDTH, page.evaluate("document.documentElement.scrollHeight"))
            page.evaluate("new Promise(done => setTimeout(done, 300))")
            page.picture(ROOT / "docs" / "images" / name)
    return code


if __name__ == "__main__":
    sys.exit(main())
