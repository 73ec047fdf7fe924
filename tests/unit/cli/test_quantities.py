"""Sizes and rates as people write them, there and back."""

from __future__ import annotations

import click
import pytest

from shardwell_server.cli.quantities import (
    ModelSize,
    Rate,
    bytes_told,
    link_told,
    seconds_told,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("650", 650),
        ("1", 1),
        ("100k", 100_000),
        ("1.5M", 1_500_000),
        ("7B", 7 * 10**9),
        ("64MB", 16_000_000),
        ("28 GiB", 7 * 2**30),
        ("280T", 280 * 10**12),
    ],
)
def test_sizes_are_elements_or_float32_bytes(text, count) -> None:
    assert ModelSize().convert(text, None, None) == count


@pytest.mark.parametrize(
    "text", ["", "0", "0B", "-1", "7b", "MB", "1e9", "nan", "7 B B", "999999T", "64Mbit/s"]
)
def test_no_sizes(text) -> None:
    with pytest.raises(click.BadParameter, match="7B"):
        ModelSize().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("1Gbit/s", 125e6), ("200 Mbit/s", 25e6), ("0.4GB/s", 0.4e9), ("2.5Gbit/s", 312.5e6)],
)
def test_rates(text, bytes_per_s) -> None:
    assert Rate().convert(text, None, None) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "1", "0Gbit/s", "1Gbps", "1G", "-1Gbit/s", "inf"])
def test_no_rates(text) -> None:
    with pytest.raises(click.BadParameter, match="1Gbit/s"):
        Rate().convert(text, None, None)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (bytes_told(0), "0 B"),
        (bytes_told(40), "40 B"),
        (bytes_told(1000), "1.00 kB"),
        (bytes_told(999_600), "1.00 MB"),
        (bytes_told(31.44e6), "31.4 MB"),
        (bytes_told(5e18), "5,000 PB"),
        (seconds_told(0.0), "0 s"),
        (seconds_told(0.0000314), "31.4 us"),
        (seconds_told(0.9996), "1.00 s"),
        (seconds_told(999.0), "999 s"),
        (seconds_told(4321.0), "72.0 min"),
        (seconds_told(7e6), "81.0 d"),
        (link_told(125e6), "1.00 Gbit/s"),
        (link_told(1e6), "8.00 Mbit/s"),
    ],
)
def test_three_digits(told, words) -> None:
    assert told == words
