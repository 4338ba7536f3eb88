"""``lynx bench``: Megatron's own recomputation and lynx, measured in real training on a real link.

Two ranks train one GPT with Megatron; every method takes its turn step by step in the same process
(``integration.benching``). The ranks sit in two network namespaces joined by a cable of a given rate,
or with ``--local`` side by side on this host.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from megatron_lynx.cli.bench_job import CASES, megatron_arguments, request
from megatron_lynx.cli.bench_plot import pareto_svg
from megatron_lynx.cli.bench_report import bench_table, docs_text
from megatron_lynx.cli.bench_result import Case, case_from, from_json, to_json
from megatron_lynx.cli.hosts import LocalHosts, TwoHosts, two_hosts
from megatron_lynx.cli.job import whole
from megatron_lynx.errors import ConfigError

RANKS = 2
START_S = 40.0
"""What starting the ranks takes out of the time of a case, in seconds."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``lynx bench``."""
    parser.add_argument(
        "--local", action="store_true", help="both ranks on this host, over the loopback (no root needed)"
    )
    parser.add_argument(
        "--links", default="1gbit,400mbit,none", metavar="RATES", help="cable rates; `none` is no limit"
    )
    parser.add_argument(
        "--cases", default="tp2,tp2-dropout,pp2", metavar="NAMES", help=f"some of {','.join(CASES)}"
    )
    parser.add_argument("--minutes", type=float, default=50.0, metavar="N", help="for everything together")
    parser.add_argument("--rounds", type=whole, metavar="N", help="steps of each method, instead of a time")
    parser.add_argument("--budgets", metavar="LIST", help="such as 10%%+,60%% (of none; + is above full)")
    parser.add_argument("--planner", default="opt", help="who makes lynx's plans (default: opt)")
    parser.add_argument("--plans", metavar="FILES", help="plan files to run as well, by commas")
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, to see that it runs")
    for name in ("num-layers", "hidden-size", "seq-length", "micro-batch-size"):
        parser.add_argument(f"--{name}", type=whole, metavar="N")
    parser.add_argument("--gpu", action="store_true", help="on CUDA devices instead of the CPU (never run)")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where logs and plots go")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the page there, plots beside it")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="measure nothing: read this")


def run(args: argparse.Namespace) -> int:
    """Measure, or read what was measured; then show and write it."""
    console = Console() if sys.stdout.isatty() else Console(width=150)
    if args.source is not None:
        if not args.source.is_file():
            raise ConfigError(f"--from {args.source}: there is no such file; `lynx bench --json` writes one")
        machine, cases = from_json(args.source.read_text(), f"--from {args.source}")
    else:
        machine, cases = _machine(args.gpu), tuple(_measure(args, console))
    for case in cases:
        console.print(bench_table(case))
    if args.json is not None:
        args.json.write_text(to_json(machine, cases))
    _plots(cases, args.folder if args.docs is None else args.docs.parent)
    if args.docs is not None:
        args.docs.write_text(docs_text(machine, cases))
    return 0


def _plots(cases: Sequence[Case], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        (folder / f"bench-{case.name}-{case.link}.svg").write_text(pareto_svg(case))


def _machine(gpu: bool) -> dict[str, Any]:
    """What measured: for the page and the JSON."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "device": "cuda" if gpu else "cpu",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def measure_cases(args: argparse.Namespace) -> tuple[Case, ...]:
    """Measure what the flags of ``configure`` ask for."""
    return tuple(_measure(args, Console()))


def _measure(args: argparse.Namespace, console: Console) -> Iterator[Case]:
    names, links = args.cases.split(","), ["loopback"] if args.local or args.gpu else args.links.split(",")
    for name in names:
        if name not in CASES:
            raise ConfigError(f"--cases {name}: {','.join(CASES)} works")
    pairs = [(name, link) for link in links for name in names if CASES[name].every_link or link == links[0]]
    seconds = max(30.0, args.minutes * 60 / len(pairs) - START_S)
    with _interruptible(), ExitStack() as stack:
        joined = stack.enter_context(two_hosts()) if links != ["loopback"] else None
        for name, link in pairs:
            if joined is not None:
                joined.set_rate(link)
            hosts = joined if joined is not None else LocalHosts()
            console.print(f"{name} over {hosts.link} ...")
            yield _case(args, name, hosts, seconds, console)


@contextmanager
def _interruptible() -> Iterator[None]:
    """A request to end becomes an exception, so that everything is cleaned up on the way out."""

    def stop(number: int, _: Any) -> NoReturn:
        raise KeyboardInterrupt(f"signal {number}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _case(
    args: argparse.Namespace, name: str, hosts: LocalHosts | TwoHosts, seconds: float, console: Console
) -> Case:
    """Run the ranks of one case over one link."""
    folder: Path = (args.folder / f"{name}-{hosts.link}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_file():
            old.unlink()
    arguments = megatron_arguments(args, name, folder.parent / "cache")
    (folder / "request.json").write_text(json.dumps(request(args, name, arguments, seconds), indent=1))
    started = time.monotonic()
    _run_ranks(folder, hosts, args.gpu, console)
    console.print(f"{name} over {hosts.link}: {time.monotonic() - started:.0f} s; logs in {folder}")
    return case_from(name, hosts.link, json.loads((folder / "result.json").read_text()))


def _run_ranks(folder: Path, hosts: LocalHosts | TwoHosts, gpu: bool, console: Console) -> None:
    """Start the ranks, one core each, show their progress, and end them all when one fails.

    Raises:
        ConfigError: a rank failed; names its log.
    """
    common = {**os.environ, **hosts.environment(), **_device(gpu), "WORLD_SIZE": str(RANKS)}
    cores = sorted(os.sched_getaffinity(0))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            own = [sys.executable, "-m", "megatron_lynx.integration.benching.rank", str(folder)]
            pin = ["taskset", "-c", str(cores[rank])] if len(cores) >= RANKS else []
            with (folder / f"rank{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [*hosts.command(rank), *pin, *own],
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        _watch(folder, ranks, console)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


def _watch(folder: Path, ranks: Sequence[subprocess.Popen[bytes]], console: Console) -> None:
    shown, progress = 0, folder / "progress.txt"
    while True:
        codes = [process.poll() for process in ranks]
        lines = progress.read_text().splitlines() if progress.exists() else []
        for line in lines[shown:]:
            console.print(f"  {line}", highlight=False)
        shown = len(lines)
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                log = folder / f"rank{rank}.log"
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise ConfigError(f"rank {rank} ended with code {code}: {' '.join(last)}; its log is {log}")
        if all(code == 0 for code in codes):
            return
        time.sleep(0.3)


def _device(gpu: bool) -> dict[str, str]:
    common = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    if gpu:
        return common
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**common, **threads, **_KEEP_FREED_PAGES, "MEGATRON_LYNX_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}


_KEEP_FREED_PAGES = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""glibc reuses freed memory instead of giving it back, as CUDA's caching allocator does, and asks for large
pages; else every method pays page faults for what it frees, and the one that keeps most pays most."""
