"""Sizes and times: read, printed, refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.errors import ConfigError
from megatron_lynx.units import GIB, format_bytes, format_ns, parse_bytes, parse_ns


@pytest.mark.parametrize(
    ("text", "size"),
    [("32GiB", 32 * GIB), (" 80 GB ", 80 * 10**9), ("1.5 kib", 1536), ("7B", 7), ("2TiB", 2048 * GIB)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["32", "GiB", "32 ms", "32 Gi", "-1GiB", "", "1e9B", "1.2.3GB", "nanGB"])
def test_sizes_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--budget .* for example 32GiB"):
        parse_bytes(text, "--budget")


def test_times_are_read() -> None:
    assert parse_ns("1.5ms") == 1_500_000
    assert parse_ns("2 s") == 2 * 10**9
    with pytest.raises(ConfigError, match="latency"):
        parse_ns("5GiB", "latency")


@given(st.integers(0, 2**60))
def test_a_printed_size_reads_back_within_its_digits(size: int) -> None:
    back = parse_bytes(format_bytes(size))
    assert abs(back - size) <= 0.005 * max(size, 1)


@given(st.integers(0, 10**15))
def test_a_printed_time_reads_back_within_its_digits(time_ns: int) -> None:
    back = parse_ns(format_ns(time_ns))
    assert abs(back - time_ns) <= 0.005 * max(time_ns, 1)


def test_negative_amounts_keep_their_sign() -> None:
    assert format_bytes(-1536) == "-1.50 KiB"
    assert format_ns(-1500) == "-1.50 us"
