"""``lynx run``: an existing Megatron script, unmodified, with ``--recompute-method lynx`` known to it.

    torchrun --nproc-per-node 8 -m megatron_lynx run PATH/TO/pretrain_gpt.py ARGS

The script runs as it would by itself: its folder comes first on the path, so that the Megatron beside
it is the one that is used.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from megatron_lynx.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """The script and everything after it, which is the script's own."""
    parser.add_argument("script", help="a Megatron training script such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")


def run(args: argparse.Namespace) -> int:
    """Run the script to its end; its exit is ours.

    Raises:
        ConfigError: there is no such file, or the script's flags do not work with lynx.
    """
    script = Path(args.script)
    if not script.is_file():
        raise ConfigError(f"run {script}: there is no such file; PATH/TO/pretrain_gpt.py works")
    # Before anything imports Megatron: the script's own checkout must win over an installed wheel.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *args.arguments]
    from megatron_lynx.integration.entry import megatron_run

    with megatron_run():
        runpy.run_path(str(script), run_name="__main__")
    return 0
