"""Megatron's compiled dataset helpers: as they come in the wheel, or built in a checkout.

At start Megatron runs ``make`` in its dataset folder and leaves the process when that fails. The wheel
has the compiled helpers but no makefile, so there it always fails. The makefile of a checkout asks for
pybind11 and for ``python3``, which may be another Python than this one: torch brings the headers of
pybind11, and this Python knows where its own are.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shlex
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.datasets import utils

from megatron_lynx.errors import ConfigError

_HELPERS = "megatron.core.datasets.helpers_cpp"


@contextlib.contextmanager
def shipped_dataset_helpers() -> Iterator[None]:
    """Use the helpers that are compiled already, or build those of a checkout, until the block ends."""
    original = utils.compile_helpers

    def compile_helpers() -> None:
        folder = Path(utils.__file__).parent
        if not _usable(folder):
            _build(folder)

    utils.compile_helpers = compile_helpers
    try:
        yield
    finally:
        utils.compile_helpers = original


def _usable(folder: Path) -> bool:
    """Whether the helpers are there for this Python, and no older than their source."""
    found, source = importlib.util.find_spec(_HELPERS), folder / "helpers.cpp"
    if found is None or found.origin is None:
        return False
    if source.exists() and Path(found.origin).stat().st_mtime < source.stat().st_mtime:
        return False
    try:
        importlib.import_module(_HELPERS)
    except ImportError:  # for another C library, or half a file
        return False
    return True


def _build(folder: Path) -> None:
    """Compile the helpers of a checkout.

    Raises:
        ConfigError: they cannot be compiled here; says what the compiler said.
    """
    where = f"Megatron's dataset helpers in {folder} are neither compiled for this Python nor compilable here"
    if not (folder / "Makefile").exists():
        raise ConfigError(
            f"{where}: there is no Makefile; a megatron-core wheel for this Python version has them"
        )
    headers = (sysconfig.get_path("include"), str(Path(torch.__file__).parent / "include"))
    command = [
        *("make", "-C", str(folder)),
        "CPPFLAGS=" + " ".join(f"-I{path}" for path in headers),
        f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
    ]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"{where}: make: {error.strerror}; `apt-get install make g++` works") from error
    if made.returncode != 0:
        said = next((line for line in made.stderr.splitlines() if "rror" in line), made.stderr[-200:])
        raise ConfigError(
            f"{where}: {said.strip()}; it takes make, g++, the headers of this Python (python3-dev) "
            f"and a folder that can be written to: `{shlex.join(command)}`"
        )
    importlib.invalidate_caches()
