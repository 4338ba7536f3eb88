"""``lynx reproduce``: the papers' tables computed again, as Markdown with charts."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_lynx.cli.job import fraction
from megatron_lynx.cli.report import console, progress
from megatron_lynx.cli.truth import measured
from megatron_lynx.errors import ConfigError
from megatron_lynx.reproduction.document import document, images
from megatron_lynx.reproduction.overlap import Result, from_json, measure, settings, to_json
from megatron_lynx.reproduction.text_times import Timings
from megatron_lynx.search.workflow import TIME_LIMIT_S

DEFAULT = "docs/reproduction.md"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        default=DEFAULT,
        help=f"the document ({DEFAULT}); plans go beside it as JSON, charts into its folder images",
    )
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="keep the settings that are in the JSON already; without it all are planned again (minutes)",
    )
    parser.add_argument(
        "--time-limit",
        type=fraction,
        metavar="SECONDS",
        default=TIME_LIMIT_S,
        help=f"what opt may take for one split ({TIME_LIMIT_S:g}); more on a busy machine",
    )


def run(args: argparse.Namespace) -> int:
    """Predict, plan, write."""
    output = Path(args.output)
    if output.suffix != ".md":
        raise ConfigError(f"--output {args.output!r} is not a Markdown file; --output {DEFAULT} works")
    if args.time_limit <= 0:
        raise ConfigError(
            f"--time-limit {args.time_limit:g} leaves no time; --time-limit {TIME_LIMIT_S:g} works"
        )
    record = output.with_suffix(".json")
    known = {result.setting: result for result in _known(record)} if args.reuse else {}
    with progress("predicting the times of arXiv 2205.05198") as status:
        timings, results = Timings.predict(), list[Result]()
        for setting in settings():
            if setting not in known:
                status.update(f"planning: {setting} on {setting.cluster}")
                known[setting] = measure(setting, time_limit_s=args.time_limit)
                _write(record, to_json(tuple(known.values())))
            results.append(known[setting])
    _write(record, to_json(results))
    _write(output, document(timings, results, measured()))
    for name, text in images(timings, results).items():
        _write(output.parent / "images" / name, text)
    console().print(f"written: {output}, {record} and {output.parent / 'images'}", markup=False)
    return 0


def _known(record: Path) -> tuple[Result, ...]:
    """The results of an earlier run; none if there was none."""
    try:
        return from_json(record.read_text("utf-8"), str(record)) if record.exists() else ()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--reuse: {record} cannot be read ({error}); without --reuse it is made"
        ) from error


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output: {path} cannot be written ({error}); --output reproduction.md works"
        ) from error
