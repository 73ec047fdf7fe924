"""Goal: what a shard says of its machine is so.

Method: files of known sizes, a directory that goes, and processor time that is used.
"""

from __future__ import annotations

import os
import shutil
import threading
import time

from harness.polling import PATIENCE_S
from harness.threads import in_background
from shardwell_server.admin import vitals
from shardwell_server.admin.vitals import ResourceMeter


def test_without_files_nothing_is_said_of_a_disk() -> None:
    found = ResourceMeter(None).read()
    assert found.core_count >= 1
    assert found.memory_bytes > 1_000_000
    assert not found.HasField("disk_used_bytes")
    assert not found.HasField("disk_free_bytes")
    assert not found.HasField("disk_size_bytes")


def test_processor_time_is_that_of_the_process() -> None:
    meter = ResourceMeter(None)
    before, used_s = meter.read().cpu_s, time.process_time()
    while time.process_time() < used_s + 0.05:
        pass
    assert meter.read().cpu_s >= before + 0.05


def test_files_count_by_what_they_occupy(tmp_path) -> None:
    """A hole takes no room, and a link is not followed."""
    (tmp_path / "parameters" / "net").mkdir(parents=True)
    (tmp_path / "parameters" / "net" / "weights").write_bytes(os.urandom(1_000_000))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "root").symlink_to("/usr")
    found = ResourceMeter(tmp_path).read()
    assert 1_000_000 <= found.disk_used_bytes < 1_200_000
    assert 0 < found.disk_free_bytes <= found.disk_size_bytes
    assert found.disk_size_bytes == shutil.disk_usage(tmp_path).total


def test_a_directory_that_is_gone_has_no_disk(tmp_path) -> None:
    meter = ResourceMeter(tmp_path / "gone")
    assert not meter.read().HasField("disk_size_bytes")


def test_one_caller_at_a_time_looks_at_the_files(tmp_path, monkeypatch) -> None:
    """While a disk hangs, the others go on with what was known before."""
    (tmp_path / "weights").write_bytes(os.urandom(1_000_000))
    meter = ResourceMeter(tmp_path)
    looks, goes_on = threading.Event(), threading.Event()
    occupied = vitals._occupied

    def hangs(directory: str) -> list[int]:
        looks.set()
        assert goes_on.wait(PATIENCE_S)
        return list(occupied(directory))

    monkeypatch.setattr(vitals, "_occupied", hangs)
    first = in_background(meter.read)
    assert looks.wait(PATIENCE_S)
    assert not meter.read().HasField("disk_used_bytes")
    assert meter.read().disk_size_bytes > 0
    goes_on.set()
    assert first.result(PATIENCE_S).disk_used_bytes >= 1_000_000
    assert meter.read().disk_used_bytes >= 1_000_000
