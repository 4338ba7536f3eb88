"""All metadata is in pyproject.toml; here is what an index page shows: the README with links that work there.

``LYNX_REPOSITORY_URL=https://HOST/OWNER/REPOSITORY`` makes relative links absolute; without it, a picture is
its description and a link its text, as neither can be followed from an index page.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def index_page(readme: str, repository: str, version: str) -> str:
    """The README with pictures and relative links as an index page can show them."""

    def target(path: str, kind: str) -> str:
        return f"{repository.rstrip('/')}/{kind}/v{version}/{path}"

    def picture(found: re.Match) -> str:
        text, path = found.groups()
        return f"![{text}]({target(path, 'raw')})" if repository else f"*{text}*"

    def link(found: re.Match) -> str:
        text, path = found.groups()
        return f"[{text}]({target(path, 'blob')})" if repository else text

    readme = re.sub(r"!\[([^\]]*)\]\((?!\w+://)([^)]+)\)", picture, readme)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+://|#)([^)]+)\)", link, readme)


def own_version() -> str:
    """The version that the package states."""
    text = (ROOT / "megatron_lynx" / "__init__.py").read_text("utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


if __name__ == "__main__":
    page = index_page(
        (ROOT / "README.md").read_text("utf-8"), os.environ.get("LYNX_REPOSITORY_URL", ""), own_version()
    )
    setup(long_description=page, long_description_content_type="text/markdown")
