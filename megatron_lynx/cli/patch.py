"""``lynx patch``: a Megatron-LM checkout that knows ``--recompute-method lynx`` by itself, and back.

lynx patch check DIR     # what would be done
lynx patch apply DIR
lynx patch revert DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_lynx.cli.patch_tree import Change, changes, read_series, write
from megatron_lynx.errors import ConfigError
from megatron_lynx.integration.versions import version_in

PATCHES = Path(__file__).resolve().parent.parent / "patches"

FOLDERS = {"0.17": "0.17", "0.18": "0.18", "0.19": "0.19", "0.20": "main"}
"""Major and minor version of Megatron-Core -> the folder with its patches."""


def configure(parser: argparse.ArgumentParser) -> None:
    """What to do, and to which checkout."""
    parser.add_argument("action", choices=("apply", "check", "revert"), help="check changes nothing")
    parser.add_argument("tree", type=Path, metavar="DIR", help="a Megatron-LM checkout")


def run(args: argparse.Namespace) -> int:
    """Plan everything, then write it or nothing.

    Raises:
        ConfigError: the checkout is none that is known; names the file and the reason.
    """
    version, folder = _release(args.tree)
    patches = read_series(PATCHES / folder)
    todo = [c for c in changes(args.tree, patches, revert=args.action == "revert") if c.needed]
    name = f"Megatron-Core {version} in {args.tree}"
    if args.action == "check":
        print(f"{name}: {_state(todo, len(patches))}")
        return 0
    if not todo:
        print(f"{name}: {'is patched' if args.action == 'apply' else 'has no patch'} already")
        return 0
    write(todo)
    for change in todo:
        print(f"{'patched' if args.action == 'apply' else 'restored'} {change.path}")
    undo = f"`lynx patch revert {args.tree}` undoes it"
    done = f"takes --recompute-method lynx; {undo}" if args.action == "apply" else "is as upstream's"
    print(f"{name}: pretrain_gpt.py {done}")
    return 0


def _release(tree: Path) -> tuple[str, str]:
    """The version of a checkout, and the folder with its patches."""
    stated = tree / "megatron" / "core" / "package_info.py"
    if not stated.is_file():
        raise ConfigError(
            f"{tree} is no Megatron-LM checkout: {stated} is missing; `git clone --branch core_v0.19.0 "
            "https://github.com/NVIDIA/Megatron-LM` makes one"
        )
    version = version_in(stated)
    folder = FOLDERS.get(".".join(version.split(".")[:2]))
    if folder is None:
        raise ConfigError(
            f"{stated} says Megatron-Core {version}; there are patches for {', '.join(FOLDERS)}. "
            "`lynx run PATH/TO/pretrain_gpt.py` needs none"
        )
    return version, folder


def _state(todo: list[Change], count: int) -> str:
    if not todo:
        return f"is patched ({count} files)"
    files = ", ".join(str(change.path) for change in todo)
    how = "not patched" if len(todo) == count else f"patched in part ({count - len(todo)} of {count} files)"
    return f"is {how}; apply would change {files}"
