"""One self-contained HTML page: timeline, memory, plan and comparison. It loads nothing.

The page is ``assets/page.html`` with the style, the scripts and the data put in. A content security
policy in it forbids every request, so that it works offline and stays as it was made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from megatron_lynx.cli.html_data import Json, Method, page_data
from megatron_lynx.cli.output import write_text
from megatron_lynx.errors import InfeasibleError
from megatron_lynx.job import Job
from megatron_lynx.plan import Plan
from megatron_lynx.search.given import timeline_of
from megatron_lynx.search.workflow import (
    MEGATRON_METHODS,
    METHODS,
    TIME_LIMIT_S,
    method_of,
    part_of,
    plan_job,
)

SCRIPTS = ("format.js", "timeline.js", "draw.js", "tables.js", "hands.js", "page.js")
"""The script's parts, in the order in which they run."""

MOVABLE = ("checkmate", "adapipe", "heu", "opt")
"""Methods that a comparison shows with the layers moved between stages too."""

_PARTS = files("megatron_lynx.cli") / "assets"


def page(
    data: Json,
    body: str = "page.html",
    styles: Sequence[str] = ("page.css",),
    scripts: Sequence[str] = SCRIPTS,
) -> str:
    """The text of a page: ``body`` with styles, scripts and data put in."""
    text = (_PARTS / body).read_text("utf-8")
    style = "\n".join((_PARTS / name).read_text("utf-8") for name in styles)
    script = "\n".join((_PARTS / name).read_text("utf-8") for name in scripts)
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
    write_text(page(data), path, "--html", "lynx.html")


def plan_page(
    job: Job, name: str, plan: Plan, time_limit_s: float = TIME_LIMIT_S, deadline: float | None = None
) -> Json:
    """The data of one plan beside all methods on the job's own split, ready by ``deadline``."""
    chosen = Method(name=name, plan=plan, timeline=timeline_of(job, plan), megatron=_is_megatron(plan))
    methods = methods_of(job, time_limit_s=time_limit_s, deadline=deadline)
    others = [method for method in methods if method.name != name]
    return page_data(f"{job.model.name}: {name}", job, [chosen, *others])


def comparison_page(job: Job, time_limit_s: float = TIME_LIMIT_S, deadline: float | None = None) -> Json:
    """The data of all methods, those that can with the layers moved between stages too, ready by
    ``deadline``."""
    methods = methods_of(job, time_limit_s=time_limit_s, deadline=part_of(deadline, 2))
    if job.parallel.pp > 1:
        methods += methods_of(job, MOVABLE, "search", time_limit_s, deadline)
    data = page_data(f"{job.model.name}: all methods", job, methods)
    fitting = [i for i, method in enumerate(data["methods"]) if method["fits"]]
    shown = min(fitting, key=lambda i: data["methods"][i]["iteration_ns"], default=0)
    return {**data, "shown": shown}


def methods_of(
    job: Job,
    names: Sequence[str] = METHODS,
    partition: str = "keep",
    time_limit_s: float = TIME_LIMIT_S,
    deadline: float | None = None,
) -> list[Method]:
    """Methods, planned and simulated; those that do not fit say why. They share the time until
    ``deadline``."""
    found = []
    for number, name in enumerate(names):
        ends = part_of(deadline, len(names) - number)
        suffix = "" if partition == "keep" else f" + {partition}"
        try:
            planned = plan_job(job, name, partition, time_limit_s=time_limit_s, deadline=ends)
        except InfeasibleError as error:
            found.append(Method(name=name + suffix, reason=str(error), megatron=name in MEGATRON_METHODS))
            continue
        found.append(
            Method(
                name=planned.plan.planner + suffix,
                plan=planned.plan,
                timeline=planned.timeline(),
                megatron=_is_megatron(planned.plan),
            )
        )
    return found


def _is_megatron(plan: Plan) -> bool:
    return method_of(plan.planner) in MEGATRON_METHODS
