"""The section of the document about what GPUs measured."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lynx.reproduction.markdown import bullets, prose, table
from megatron_lynx.reproduction.truth import FIGURES, STEP, Compared
from megatron_lynx.units import GIB


def truth_text(rows: Sequence[Compared]) -> str:
    """Every row beside what is predicted, and how far off the worst are."""
    head = ["run", "cluster", "what", "predicted", "measured", "error"]
    lines = []
    for row in rows:
        for figure in FIGURES:
            error = row.error(figure)
            if error is None:
                continue
            what = figure + (", host-bound" if figure == STEP and row.host_bound else "")
            sizes = [_size(figure, value) for value in (row.predicted[figure], row.case.measured[figure])]
            lines.append([f"`{row.case.name}`", row.case.cluster, what, *sizes, f"{error:+.1%}"])
    return "\n".join(
        [
            "## What real GPUs measured\n",
            prose(
                "Public figures of other projects, beside what `lynx truth` predicts from the same flags;",
                "`lynx truth FOLDER` does the same for other tables of that form. No row has a rule of its",
                "own. Sources: NVIDIA/Megatron-LM's golden values of continuous integration (A100, H100) and",
                "MooreThreads/SimuMax's runs on B200; the tables are in `megatron_lynx/configs/truth`.",
            ),
            bullets(*_worst(rows)),
            prose(
                "A step is *host-bound* where the process that launches kernels needs longer than the",
                "device: then that is its time. What a host needs for a kernel, a wait and a step is one set",
                "of figures for each kind of machine, fitted to all its host-bound rows together, so those",
                "rows show the spread of real runs, which are up to 40 % apart for one test.",
            ),
            table(head, lines),
        ]
    )


def _worst(rows: Sequence[Compared]) -> list[str]:
    found = []
    for figure in FIGURES:
        for host_bound in (False, True) if figure == STEP else (None,):
            errors = [
                error
                for row in rows
                if (error := row.error(figure)) is not None and host_bound in (None, row.host_bound)
            ]
            if errors:
                kind = {True: ", host-bound", False: ", bound by the device", None: ""}[host_bound]
                found.append(f"{figure}{kind}: {len(errors)} rows, worst {max(errors, key=abs):+.1%}")
    return found


def _size(figure: str, value: int) -> str:
    return f"{value / 1e6:,.0f} ms" if figure == STEP else f"{value / GIB:.2f} GiB"
