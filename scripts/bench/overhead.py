"""What the runtime itself costs: lynx with everything kept against no recomputation, and lynx with everything
rebuilt on demand against Megatron's full recomputation.

Two ranks on this machine train one small GPT; the four methods take turns step by step in one process, so
that the ratios of their medians hold even where the times do not.

    python scripts/bench/overhead.py [--rounds 15] [--tiny]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_lynx.cli.bench import configure, measure_cases
from megatron_lynx.cli.bench_result import Case, Measured
from megatron_lynx.errors import LynxError

PAIRS = (
    ("lynx keeps everything", "none", 1.01),
    ("lynx drops everything", "full-uniform-1", 1.00),
)
"""A method, what it is measured against, and the ratio that it may reach."""


def main() -> int:
    """Measure and print; the exit code is 1 if a ratio is above what it may be."""
    parser = argparse.ArgumentParser(description="Measure what the runtime itself costs.")
    configure(parser)
    shape = {"hidden_size": 512, "seq_length": 512, "micro_batch_size": 2}
    folder = Path(".bench") / "overhead"
    parser.set_defaults(local=True, cases="tp2-dropout", rounds=15, folder=folder, **shape)
    args = parser.parse_args()
    args.overhead = True
    try:
        cases = measure_cases(args)
    except LynxError as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 2
    return max(show(case) for case in cases)


def show(case: Case) -> int:
    """Print the ratios of one case; 1 if one of them is too large."""
    late = 0
    for name, against, allowed in PAIRS:
        own, other = case.row(name), case.row(against)
        assert own is not None
        assert other is not None
        ratio = own.step_ns / other.step_ns
        late |= ratio > allowed
        sides = f"{name} {_times(own)}, {against} {_times(other)}"
        print(f"{case.name}: {sides}: ratio {ratio:.3f}, allowed {allowed:.2f}")
    return int(late)


def _times(row: Measured) -> str:
    """Median and quartiles."""
    return f"{row.step_ns / 1e6:.0f} ms ({row.low_ns / 1e6:.0f}-{row.high_ns / 1e6:.0f})"


if __name__ == "__main__":
    sys.exit(main())
