"""The page of ``lynx tune``: step against peak for everything that was planned, filtered as one likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from megatron_lynx.cli.html import page
from megatron_lynx.cli.html_data import Json
from megatron_lynx.search.found import WITH, WITHOUT, Tuned, tokens_per_device

SCRIPTS = ("format.js", "tune.js")
SCHEMA = 1


def tune_page(tuned: Sequence[Tuned]) -> str:
    """The page's text; one search, or one for each budget."""
    return page(tune_data(tuned), "tune.html", ("page.css", "tune.css"), SCRIPTS)


def tune_data(tuned: Sequence[Tuned]) -> Json:
    """Everything that the page shows. A point is an entry with its budget."""
    question = tuned[0].question
    budgets = [one.question.memory_bytes or one.question.cluster.budget_bytes for one in tuned]
    points = [
        {
            **asdict(entry.config),
            "name": str(entry.config),
            "side": side,
            "budget_bytes": budget,
            "step_ns": entry.iteration_ns,
            "peak_bytes": entry.fullest[1],
            "stage": entry.fullest[0],
            "method": entry.row.method,
            "exact": entry.exact,
            "costs": entry.costs,
            "recomputed": entry.recomputed,
            "layout": entry.plan.layout,
            "tokens": tokens_per_device(one.question, entry.iteration_ns),
            "mfu": entry.row.mfu or 0.0,
        }
        for one, budget in zip(tuned, budgets, strict=True)
        for side in (WITH, WITHOUT)
        for entry in one.found[side]
    ]
    gains = [f"{one.gain:.3f}" if one.gain else None for one in tuned]
    return {
        "schema": SCHEMA,
        "title": f"{question.model.name} on {question.devices} devices",
        "job": f"{question.cluster.name}, sequence {question.seq_length}, "
        f"global batch {question.global_batch_size}",
        "budget_bytes": max(budgets),
        "gains": gains,
        "tallies": [{side: str(tally) for side, tally in one.tallies.items()} for one in tuned],
        "points": points,
    }
