"""Parsing and printing of the two units: integer bytes and integer nanoseconds."""

from __future__ import annotations

import re

from megatron_lynx.errors import ConfigError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_BYTES = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
}
_NS = {"ns": 1, "us": 1000, "ms": 1000**2, "s": 1000**3}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def _parse(text: str, table: dict[str, int], flag: str, example: str) -> int:
    match = _QUANTITY.fullmatch(text)
    scale = table.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        units = ", ".join(table)
        raise ConfigError(f"{flag} {text!r} is not a number with a unit ({units}); for example {example}")
    return round(float(match.group(1)) * scale)


def parse_bytes(text: str, flag: str = "size") -> int:
    """Read a size such as ``32GiB`` or ``80 GB`` as bytes.

    Raises:
        ConfigError: no number, or no unit or an unknown one; names ``flag``.
    """
    return _parse(text, _BYTES, flag, "32GiB")


def parse_ns(text: str, flag: str = "time") -> int:
    """Read a time such as ``1.5ms`` as nanoseconds.

    Raises:
        ConfigError: no number, or no unit or an unknown one; names ``flag``.
    """
    return _parse(text, _NS, flag, "1.5ms")


def format_bytes(size_bytes: int) -> str:
    """Print a size for people: ``1536`` is ``1.50 KiB``."""
    value, sign = float(abs(size_bytes)), "-" if size_bytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.2f} {unit}"
        value /= 1024
    return f"{sign}{value:.2f} TiB"


def format_ns(time_ns: int) -> str:
    """Print a time for people: ``1500`` is ``1.50 us``."""
    value, sign = float(abs(time_ns)), "-" if time_ns < 0 else ""
    for unit in ("ns", "us", "ms"):
        if value < 1000:
            return f"{sign}{value:.0f} ns" if unit == "ns" else f"{sign}{value:.2f} {unit}"
        value /= 1000
    return f"{sign}{value:.3f} s"
