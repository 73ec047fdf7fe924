"""What benchmarks/outer.py computes of what it has measured."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def part(name: str) -> ModuleType:
    return importlib.import_module(f"outer.{name}")


@pytest.mark.usefixtures("benchmark_path")
class TestCounted:
    def test_an_offer_counts_with_the_steps_before_it_when_it_is_taken(self) -> None:
        counted = part("member").Counted(2)
        assert counted.step([False, False], kept=False) == 0
        assert counted.step([True, False], kept=False) == 0  # it has two steps of a half
        assert counted.step([True, False], kept=False) == 0
        assert counted.step([False, False], kept=False) == 1.0

    def test_steps_of_an_offer_that_did_not_count_are_in_the_next_one(self) -> None:
        counted = part("member").Counted(1)
        counted.step([True], kept=False)
        assert counted.step([False], kept=True) == 0
        counted.step([True], kept=False)
        assert counted.step([False], kept=False) == 3

    def test_a_fragment_may_be_taken_and_another_one_offered_after_one_step(self) -> None:
        counted = part("member").Counted(2)
        counted.step([True, False], kept=False)
        assert counted.step([False, True], kept=False) == 0.5
        assert counted.step([False, False], kept=False) == 1.0


@pytest.mark.usefixtures("benchmark_path")
class TestLostSeconds:
    @pytest.mark.parametrize(
        ("steps_at_s", "expected"),
        [
            ([9.0, 10.0, 11.0, 12.0], 0.0),
            ([9.0, 10.0, 13.0, 14.0], 2.0),  # two late
            ([9.0, 10.0, 10.5, 11.0], 0.0),  # faster than undisturbed: nothing is lost
            ([9.0], 10.0),  # none any more
        ],
    )
    def test_is_what_steps_took_longer(self, steps_at_s: list[float], expected: float) -> None:
        lost_s = part("peer").lost_s
        assert lost_s(steps_at_s, kill_s=10.0, until_s=20.0, step_s=1.0) == pytest.approx(expected)


@pytest.mark.usefixtures("benchmark_path")
class TestTraffic:
    def test_first_weights_are_in_the_second_row_of_each_direction(self) -> None:
        traffic = part("traffic")
        step_count = traffic.SYNC_EVERY * traffic.OUTER_STEP_COUNT
        first, warm = {"sent": 7, "received": 0}, {"sent": 107, "received": 100}
        last = {key: value + 2 * step_count for key, value in warm.items()}
        before = {"sent": 5, "received": 5}
        after = {key: value + 4 * traffic.EXCHANGE_COUNT for key, value in before.items()}
        found = [row.found for row in traffic.rows(first, warm, last, before, after)]
        assert found[0].startswith("0.50000: ")
        assert found[2].startswith("0.50000: ")
        whole = (107 + 2 * step_count) / (step_count + traffic.SYNC_EVERY) / 4
        assert found[1].startswith(f"{whole:.5f}: ")


@pytest.mark.usefixtures("benchmark_path")
class TestRowsBesideAPeer:
    def test_ratios_are_ours_over_theirs(self) -> None:
        peer = part("peer")
        own = peer.Found(2e6, 0.5, [0.0, 1.0], 8.0)
        other = peer.Found(8e6, 0.5, [5.0, 15.0], 7.5)
        found = [row.found for row in peer.rows_of(own, other)]
        assert found[0].startswith("0.250: 2.00 of 8.00 MB")
        assert "7.5 took part" in found[0]
        assert found[1].startswith("0.050: 0.0, 1.0 s of 5.0, 15.0 s")

    def test_a_peer_that_loses_nothing_is_infinitely_better(self) -> None:
        peer = part("peer")
        own = peer.Found(1.0, 0.5, [1.0], 8.0)
        assert peer.rows_of(own, own._replace(lost_s=[0.0]))[1].found.startswith("inf: ")


@pytest.mark.usefixtures("benchmark_path")
def test_the_hidden_part_is_of_the_time_between_both_looks_at_counters() -> None:
    links, step = part("links"), importlib.import_module("peers.turns").Step
    before = step(
        1.0, 0.0, [{"hidden_s": 5.0, "waited_s": 9.0}, {"hidden_s": 1.0, "waited_s": 1.0}]
    )
    after = step(
        1.0, 0.0, [{"hidden_s": 8.0, "waited_s": 10.0}, {"hidden_s": 2.0, "waited_s": 1.0}]
    )
    assert links.hidden_part(before, after) == pytest.approx((0.75 + 1.0) / 2)


@pytest.mark.usefixtures("benchmark_path")
def test_a_rate_without_a_synchronous_step_has_a_row_that_says_so() -> None:
    links, step = part("links"), importlib.import_module("peers.turns").Step
    rate = links.Rate(10, 0.0, 1, 0, 1)
    reports = [{"hidden_s": 0.0, "waited_s": 0.0}], [{"hidden_s": 1.0, "waited_s": 3.0}]
    outer = step(1.0, 0.0, reports[0]), step(26.0, 0.0, reports[1])
    row = links.row_of(rate, outer, {})
    assert row.goal == "finishes"
    assert row.found.startswith("a synchronous step did not end within ")
    assert "260.0 ms, hidden 0.25" in row.found
    assert links.row_of(rate, outer, {"20 ms": 52.0}).found.startswith("200.0 times the 52.00 s")


@pytest.mark.usefixtures("benchmark_path")
def test_a_relay_has_room_for_what_a_link_carries_in_two_delays() -> None:
    relay = part("relay")
    assert relay.room_bytes(0.01, 1000) == 2_500_000
    assert relay.room_bytes(0.01, 1) == relay.ROOM_BYTES_MIN


def test_a_relay_delays_each_way_and_ends_with_its_standard_input() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        port = free.getsockname()[1]
        free.close()
        target = f"{port}=127.0.0.1:{server.getsockname()[1]}"
        program = str(BENCHMARKS / "outer" / "relay.py")
        process = subprocess.Popen(
            [sys.executable, program, "50", "1", target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "relaying\n"

            def echo() -> None:
                connection, _ = server.accept()
                with connection:
                    while piece := connection.recv(1 << 16):
                        connection.sendall(piece)

            thread = threading.Thread(target=echo)
            thread.start()
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                began_s = time.monotonic()
                sent = bytes(range(256)) * 4096  # more than its room
                sender = threading.Thread(target=client.sendall, args=(sent,))
                sender.start()
                came = b""
                while len(came) < len(sent):
                    came += client.recv(1 << 16)
                assert came == sent
                assert time.monotonic() - began_s >= 0.1  # never sooner, on any machine
                sender.join()
            thread.join(60)
            assert not thread.is_alive()
            process.stdin.close()  # type: ignore[union-attr]
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]


def test_a_part_that_takes_too_long_or_fails_leaves_the_rows_before() -> None:
    code = (
        "import sys, time, json, runpy\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        f"outer = runpy.run_path({str(BENCHMARKS / 'outer.py')!r})\n"
        "Row, Part = outer['Row'], outer['Part']\n"
        "def slow(args):\n"
        "    yield Row('a', '1', '2')\n"
        "    time.sleep(600)\n"
        "def broken(args):\n"
        "    yield Row('b', '1', '2')\n"
        "    raise ValueError('why')\n"
        "outer['PARTS'].update(slow=Part(slow, 1), broken=Part(broken, 60))\n"
        "print(json.dumps(outer['measured']('slow', None) + outer['measured']('broken', None)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == (
        '[["a", "1", "2"], ["slow", "", "did not end within 1 s"], '
        '["b", "1", "2"], ["broken", "", "failed: ValueError: why"]]'
    )
