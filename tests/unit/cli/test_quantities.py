"""Sizes and rates as people write them, there and back."""

from __future__ import annotations

import click
import pytest

from shardwell_server.cli.quantities import (
    ByteCount,
    ModelSize,
    Rate,
    bytes_words,
    link_words,
    seconds_words,
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
    ("text", "count"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("9223372036854775807", 2**63 - 1),
        ("50MB", 50 * 10**6),
        ("1.5 kB", 1500),
        ("2GiB", 2**31),
    ],
)
def test_bytes_with_and_without_a_unit(text, count) -> None:
    assert ByteCount(0).convert(text, None, None) == count
    assert ByteCount(0, per_second=True).convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "-1", "50mb", "50M", "MB", "nan", "1.5", "9999999TiB", "5B"])
def test_no_bytes(text) -> None:
    with pytest.raises(click.BadParameter, match="as 50MB"):
        ByteCount(0).convert(text, None, None)


def test_a_rate_of_bytes_may_say_so() -> None:
    assert ByteCount(0, per_second=True).convert("50MB/s", None, None) == 50 * 10**6
    with pytest.raises(click.BadParameter, match="as 50MB"):
        ByteCount(0).convert("50MB/s", None, None)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("1Gbit/s", 125e6), ("200 Mbit/s", 25e6), ("0.4GB/s", 0.4e9), ("2.5Gbit/s", 312.5e6)],
)
def test_rates_are_read_with_their_units(text, bytes_per_s) -> None:
    assert Rate().convert(text, None, None) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "1", "0Gbit/s", "1Gbps", "1G", "-1Gbit/s", "inf"])
def test_rates_without_a_known_unit_are_refused(text) -> None:
    with pytest.raises(click.BadParameter, match="1Gbit/s"):
        Rate().convert(text, None, None)


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        (bytes_words(0), "0 B"),
        (bytes_words(40), "40 B"),
        (bytes_words(1000), "1.00 kB"),
        (bytes_words(999_600), "1.00 MB"),
        (bytes_words(31.44e6), "31.4 MB"),
        (bytes_words(5e18), "5,000 PB"),
        (seconds_words(0.0), "0 s"),
        (seconds_words(0.0000314), "31.4 us"),
        (seconds_words(0.9996), "1.00 s"),
        (seconds_words(999.0), "999 s"),
        (seconds_words(4321.0), "72.0 min"),
        (seconds_words(7e6), "81.0 d"),
        (link_words(125e6), "1.00 Gbit/s"),
        (link_words(1e6), "8.00 Mbit/s"),
    ],
)
def test_figures_have_three_digits(figure, words) -> None:
    assert figure == words
