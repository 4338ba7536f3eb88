"""One self-contained HTML page: timeline, memory, plan and comparison. It loads nothing.

The page is ``assets/page.html`` with the style, the scripts and the data put in. A content security
policy in it forbids every request, so that it works offline and stays as it was made.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path

from megatron_lynx.cli.html_data import Json, Method, page_data
from megatron_lynx.errors import ConfigError, InfeasibleError
from megatron_lynx.job import Job
from megatron_lynx.plan import Plan
from megatron_lynx.workflow import MEGATRON_METHODS, METHODS, plan_job, timeline_of

SCRIPTS = ("format.js", "timeline.js", "draw.js", "tables.js", "hands.js", "page.js")
"""The script's parts, in the order in which they run."""

_PARTS = files("megatron_lynx.cli") / "assets"


def page(data: Json) -> str:
    """The page's text."""
    text = (_PARTS / "page.html").read_text("utf-8")
    style = (_PARTS / "page.css").read_text("utf-8")
    script = "\n".join((_PARTS / name).read_text("utf-8") for name in SCRIPTS)
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"title": escape(data["title"]), "style": style, "script": script, "data": embedded}
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part, 1)
    return text


def write_page(data: Json, path: str) -> None:
    """Write the page.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(page(data), "utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path!r} cannot be written ({error}); --html lynx.html works") from error


def plan_page(job: Job, name: str, plan: Plan) -> Json:
    """The data of one plan beside all methods on the job's own split."""
    chosen = Method(name=name, plan=plan, timeline=timeline_of(job, plan), megatron=_is_megatron(plan))
    others = [method for method in methods_of(job) if method.name != name]
    return page_data(f"{job.model.name}: {name}", job, [chosen, *others])


def methods_of(job: Job, partition: str = "keep") -> list[Method]:
    """Every method, planned and simulated; those that do not fit say why."""
    found = []
    for method in METHODS:
        try:
            plan = plan_job(job, method, partition).plan
        except InfeasibleError as error:
            found.append(Method(name=method, reason=str(error), megatron=method in MEGATRON_METHODS))
            continue
        timeline = timeline_of(job, plan)
        found.append(Method(name=plan.planner, plan=plan, timeline=timeline, megatron=_is_megatron(plan)))
    return found


def _is_megatron(plan: Plan) -> bool:
    return plan.planner.rstrip("-0123456789") in MEGATRON_METHODS
