"""What is installed here, and what the machine has; nothing heavy is imported to find out."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from megatron_lynx.errors import InstallError
from megatron_lynx.integration.versions import find_megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device: its memory, and what already lies on it."""

    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Versions are None where the package is missing; ``transformer_engine_torch`` says whether Transformer
    Engine has its half for torch (its empty wheel has not); ``megatron_error`` why a Megatron that is there
    cannot be read."""

    python: tuple[int, int] = (3, 12)
    torch: str | None = None
    megatron: str | None = None
    megatron_place: str = ""
    megatron_trainer: bool = True
    megatron_error: str = ""
    transformer_engine: str | None = None
    transformer_engine_torch: bool = False
    apex: bool = False
    psutil: bool = True
    gpus: tuple[Gpu, ...] = ()
    interfaces: tuple[str, ...] = ("lo",)


def this_machine() -> Machine:
    """What is here."""
    version, place, trainer, error = _megatron()
    return Machine(
        python=sys.version_info[:2],
        torch=_version("torch"),
        megatron=version,
        megatron_place=place,
        megatron_trainer=trainer,
        megatron_error=error,
        transformer_engine=_version("transformer_engine") or _version("transformer-engine"),
        transformer_engine_torch=_found("transformer_engine") and _found("transformer_engine_torch"),
        apex=_found("apex"),
        psutil=_found("psutil"),
        gpus=_gpus(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )


def _megatron() -> tuple[str | None, str, bool, str]:
    try:
        found = find_megatron()
    except InstallError as error:
        return None, "", False, str(error)
    if found is None:
        return None, "", False, ""
    return found.version, str(found.core.parent.parent), found.training is not None, ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _gpus(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> tuple[Gpu, ...]:
    """The devices that ``nvidia-smi`` shows and ``CUDA_VISIBLE_DEVICES`` leaves."""
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if done.returncode:
        return ()
    rows = [[int(word) << 20 for word in line.split(",")] for line in done.stdout.splitlines() if line]
    gpus = [Gpu(total_bytes=total, used_bytes=used) for total, used in rows]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not all(word.strip().isdigit() for word in visible.split(",")):
        return tuple(gpus) if visible != "" else ()
    return tuple(gpus[int(word)] for word in visible.split(",") if int(word) < len(gpus))
