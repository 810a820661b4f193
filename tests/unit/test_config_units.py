"""Byte sizes."""

from __future__ import annotations

import pytest

from kvlaunch.config.units import exact_bytes, format_bytes, parse_bytes
from kvlaunch.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("1e9", 10**9),
        ("1e3MiB", 1000 << 20),
        ("10GB", 10**10),
        ("0.1GB", 10**8),
        ("1TB", 10**12),
        ("3G", 3 << 30),
        ("3Gi", 3 << 30),
        ("1_000", 1000),
        (".5KiB", 512),
        ("7B", 7),
        ("0", 0),
        (4096, 4096),
        (4096.0, 4096),
    ],
)
def test_parse(text: str | int | float, count: int) -> None:
    assert parse_bytes(text) == count


def test_large_sizes_keep_their_low_digits() -> None:
    assert parse_bytes("9007199254740993") == 9007199254740993


@pytest.mark.parametrize(
    "text",
    ["", "x", "two", "-1", "1.5", "GiB", "1iB", "1 2", "1.5.5GiB", "nan", "inf", "1GiBs", -1, 1.5, float("nan"), True],
)
def test_refused(text: str | int | float) -> None:
    with pytest.raises(ConfigError, match=r"kv\.reserve wants a size in bytes, got ") as e:
        parse_bytes(text, what="kv.reserve")
    assert "2GiB" in str(e.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.50KiB"),
        (2 << 30, "2GiB"),
        (-1024, "-1KiB"),
        (5 << 50, "5PiB"),
    ],
)
def test_format(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1536 << 20, 2 << 30, 10**9, (1 << 40) + 1])
def test_exact_round_trip(count: int) -> None:
    assert parse_bytes(exact_bytes(count)) == count
