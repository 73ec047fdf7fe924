"""Slurm's lists of hosts. The oracle writes lists from hosts that it knows."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.errors import ArgumentError
from shardwell.group.launch.launchers import HOSTLIST_LENGTH_MAX, first_host


@pytest.mark.parametrize(
    ("hostlist", "host"),
    [
        ("GPU71E4", "GPU71E4"),
        ("node[1-2]", "node1"),
        ("node[01-04,07],gpu3", "node01"),
        ("node[007]", "node007"),
        ("gpu3,node[01-04]", "gpu3"),
        ("rack[1-2]n[01-16]-ib", "rack1n01-ib"),
        ("a.example.org,b.example.org", "a.example.org"),
        ("[3-5]", "3"),
    ],
)
def test_the_first_of_lists_as_slurm_writes_them(hostlist, host) -> None:
    assert first_host(hostlist) == host


_PREFIXES = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z]", fullmatch=True)


@st.composite
def _entries(draw: st.DrawFn) -> tuple[str, str]:
    """An entry of a list, and its first host."""
    text = host = ""
    for _ in range(draw(st.integers(1, 3))):
        prefix, width = draw(_PREFIXES), draw(st.integers(1, 4))
        numbers = draw(st.lists(st.integers(0, 9999), min_size=1, max_size=4))
        ranges = [
            f"{number:0{width}}" + draw(st.sampled_from(["", f"-{number + 3:0{width}}"]))
            for number in numbers
        ]
        text += f"{prefix}[{','.join(ranges)}]"
        host += f"{prefix}{numbers[0]:0{width}}"
    suffix = draw(st.sampled_from(["", "-ib", ".local"]))
    return text + suffix, host + suffix


@given(st.lists(_entries(), min_size=1, max_size=5))
def test_the_first_of_any_list(entries) -> None:
    assert first_host(",".join(text for text, _ in entries)) == entries[0][1]


@given(st.text(max_size=60))
def test_any_file_gives_a_host_or_a_clear_error(text) -> None:
    with contextlib.suppress(ArgumentError):
        host = first_host(text)
        assert host
        assert not set(host) & set("[], \n")


@pytest.mark.parametrize(
    "hostlist",
    [
        "",
        ",",
        "node[",
        "node[]",
        "node[1-]",
        "node[a]",
        "node[1]]",
        "n[1[2]]",
        "a b",
        "node[1",
        "é",
    ],
)
def test_what_is_no_list(hostlist) -> None:
    with pytest.raises(ArgumentError, match="list of hosts"):
        first_host(hostlist)


def test_a_list_that_is_too_long() -> None:
    assert first_host(("n," * HOSTLIST_LENGTH_MAX)[:HOSTLIST_LENGTH_MAX]) == "n"
    with pytest.raises(ArgumentError, match="at most 65536 characters"):
        first_host("n" * (HOSTLIST_LENGTH_MAX + 1))
