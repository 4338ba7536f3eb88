"""``lynx truth``: what GPUs measured beside what is predicted, for every row of a folder."""

from __future__ import annotations

import argparse
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

from megatron_lynx.cli.job import choices_from
from megatron_lynx.errors import ConfigError
from megatron_lynx.reproduction.truth import FIGURES, STEP, Case, Compared, compare_all, read_cases
from megatron_lynx.search.workflow import Job
from megatron_lynx.units import format_bytes, format_ns


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="tables of measured runs (default: ours)")


def run(args: argparse.Namespace) -> int:
    """Read, predict, print."""
    for line in lines(measured(args.folder)):
        print(line)
    return 0


def measured(folder: str | None = None) -> tuple[Compared, ...]:
    """Every row of ``folder``, or of the figures that come with the package."""
    if folder is not None:
        if not Path(folder).is_dir():
            raise ConfigError(f"{folder!r} is not a folder; `lynx truth` alone has tables of its own")
        return compare_all(read_cases(Path(folder)), job_of)
    with as_file(files("megatron_lynx") / "configs" / "truth") as own:
        return compare_all(read_cases(own), job_of)


def job_of(case: Case) -> Job:
    """The job that a case's flags describe."""
    with tempfile.NamedTemporaryFile("w", suffix=".args") as file:
        file.write(case.flags)
        file.flush()
        args = argparse.Namespace(from_args=file.name, cluster=case.cluster, dp=case.dp, planner="none")
        return choices_from(args).job


def lines(rows: tuple[Compared, ...]) -> list[str]:
    """For each run a line of its own, and one for each figure: at most 80 columns, names apart."""
    found = [f"{'':<30}{'predicted':>15}{'measured':>15}{'error':>9}"]
    for row in rows:
        found.append(f"{row.case.name} on {row.case.cluster}")
        for figure in FIGURES:
            error = row.error(figure)
            if error is None:
                continue
            show = format_ns if figure == STEP else format_bytes
            label = f"  {figure}" + (", host-bound" if figure == STEP and row.host_bound else "")
            values = [show(row.predicted[figure]), show(row.case.measured[figure])]
            found.append(f"{label:<30}{values[0]:>15}{values[1]:>15}{error:>+9.1%}")
    return found
