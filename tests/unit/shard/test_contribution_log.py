"""The contribution log's file: whole lines, and what becomes of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwell.errors import ArgumentError
from shardwell.placement.slices import Slice
from shardwell_server.shard.contribution_log import ClosedSet, ContributionLog

CLOSED = ClosedSet("net", 255, 3, Slice(192, 64), 7, ("w1", "w0"), is_restored=False)
LINE = {
    "format": 1,
    "parameter": "net",
    "incarnation": "ff",
    "shard": 2,
    "chunk": 3,
    "offset": 192,
    "size": 64,
    "step": 7,
    "contributors": ["w1", "w0"],
}


def written(path: Path, *taken: ClosedSet) -> None:
    log = ContributionLog(path, 2)
    for each in taken:
        log.take(each)
    log.close()


def test_each_set_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, CLOSED, CLOSED._replace(is_restored=True))
    written(path, CLOSED._replace(step=8))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [LINE, {**LINE, "restored": True}, {**LINE, "step": 8}]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("cut", [1, 10, 20, 60])
def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log"
    written(path, CLOSED)
    path.write_bytes(path.read_bytes()[:cut])
    for _ in range(2):
        written(path, CLOSED)
    torn, *lines = path.read_text().splitlines()
    assert len(torn) == cut
    assert [json.loads(line) for line in lines] == [LINE, LINE]


@pytest.mark.parametrize("content", ["my notes\n", "\n", '{"time": "12:00"}\n', '{"parameter": 3'])
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(ArgumentError, match="is no contribution log"):
        ContributionLog(path, 0)
    assert path.read_text() == content


def test_a_file_that_can_t_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"can't be written: No such file.*--contribution-log"):
        ContributionLog(tmp_path / "nowhere" / "log", 0)


def test_a_full_disk_is_said_with_what_is_left_out() -> None:
    log = ContributionLog(Path("/dev/full"), 0)
    assert log.trouble == ""
    log.take(CLOSED)
    log.take(CLOSED)
    assert "lacks 2 sets of this process, which could not be written: No space" in log.trouble
    log.close()
