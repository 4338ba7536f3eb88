"""What recomputation costs the host: CPU time of a layer and microbatch under each method, on one core.

A late host idles its device, so this matters where layers are small. Four layers of hidden size 32, four
microbatches of 2 x 16 tokens, dropout, Megatron's local layers over the CPU backend.

    python scripts/bench/host_time.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's tests are not installed

from tests.support.launch import run_ranks


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="What recomputation costs the host.")
    parser.add_argument("--rounds", type=int, default=5, help="how often each method is measured")
    args = parser.parse_args()
    (times,) = run_ranks(1, "tests.megatron_cpu.host_time:measure", args.rounds, timeout_s=3600)
    stock = times["stock"]
    print("| method | CPU ms a layer and microbatch | more than stock |")
    print("|---|---:|---:|")
    print(f"| stock | {stock:.2f} | |")
    for name, time_ms in times.items():
        if name != "stock":
            print(f"| {name} | {time_ms:.2f} | {(time_ms / stock - 1) * 100:+.0f} % |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
