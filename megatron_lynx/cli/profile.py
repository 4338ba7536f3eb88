"""``lynx profile``: measure a job's costs on the ranks that will train it.

    torchrun --nproc-per-node 2 -m megatron_lynx profile --output costs.json -- MEGATRON'S ARGUMENTS

The file goes to ``--lynx-profile`` of a training run, or to ``--profile`` of the planning commands.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from megatron_lynx.cli.report import Grid
from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError
from megatron_lynx.units import format_ns


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``lynx profile``."""
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the costs go")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="after `--`: the arguments of the Megatron run"
    )


def run(args: argparse.Namespace) -> int:
    """Measure; rank 0 writes the file and shows a table."""
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    if not arguments:
        raise ConfigError(
            "lynx profile: Megatron's arguments are missing; `lynx profile --output FILE -- ARGS`"
        )
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
    from megatron_lynx.integration.measuring.profiling import profile

    table = profile(arguments, args.output)
    if os.environ["RANK"] == "0":
        Console().print(costs_table(table))
        Console().print(f"Written to {args.output}: for --lynx-profile, and `lynx plan --profile`.")
    return 0


def costs_table(costs: CostTable) -> Grid:
    """The costs for people: one line a region, then links and ends."""
    table = Grid(f"one microbatch on one rank, {costs.source}")
    table.add_column("what", "forward", "backward", "of it weights", "collective")
    layer = costs.layer
    for region, forward_ns in layer.forward_ns.items():
        waits = [
            time for slot, time in layer.collective_ns.items() if slot.split(":")[1].split(".")[0] == region
        ]
        table.add_row(
            region,
            format_ns(forward_ns),
            format_ns(layer.backward_ns(region)),
            format_ns(layer.wgrad_ns[region]) if region in layer.wgrad_ns else "",
            format_ns(max(waits)) if waits else "",
        )
    table.add_row("embedding", format_ns(costs.embedding_forward_ns), format_ns(costs.embedding_backward_ns))
    table.add_row("head and loss", format_ns(costs.head_forward_ns), format_ns(costs.head_backward_ns))
    table.add_row("transfer between stages", format_ns(costs.p2p_ns))
    table.add_row("compute beside a collective", f"x {layer.contention:.2f}")
    return table
