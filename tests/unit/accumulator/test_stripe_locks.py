"""Goal: requests that conflict exclude each other, in their order; others never wait.

Method: threads that are known to wait, because the locks say so; hypothesis draws crowds. Oracle:
which stripes each request has, compared pair by pair.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.polling import PATIENCE_S, eventually
from shardwell_server.accumulator.stripe_locks import Hold, StripeLocks

STRIPE_COUNT = 10
TIMEOUT_S = PATIENCE_S


def stripes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


class Crowd:
    """Threads that hold something until `let_go`."""

    def __init__(self, locks: StripeLocks) -> None:
        self.locks = locks
        self.granted: list[str] = []
        self._threads: dict[str, tuple[threading.Thread, threading.Event]] = {}

    def ask(self, name: str, hold: Hold) -> None:
        """Starts one, and returns when it holds or waits."""
        release = threading.Event()

        def run() -> None:
            with hold:
                self.granted.append(name)
                assert release.wait(TIMEOUT_S)

        thread = threading.Thread(target=run, daemon=True)
        self._threads[name] = thread, release
        before = len(self.granted) + self.locks.waiting_count
        thread.start()
        eventually(name, lambda: len(self.granted) + self.locks.waiting_count > before)

    def let_go(self, name: str) -> None:
        """Ends one that holds; returns when those who waited for it hold."""
        assert name in self.granted
        thread, release = self._threads.pop(name)
        release.set()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        waiting = self.locks.waiting_count
        eventually("who was granted runs", lambda: self._runs(len(self._threads) - waiting))

    def _runs(self, count: int) -> bool:
        return sum(name in self.granted for name in self._threads) == count

    def end(self) -> None:
        while self._threads:
            self.let_go(next(name for name in self.granted if name in self._threads))


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd(StripeLocks(STRIPE_COUNT))
    yield crowd
    crowd.end()
    assert crowd.locks.waiting_count == 0
    with crowd.locks.everything():
        pass


def test_writers_of_different_stripes_do_not_wait(crowd: Crowd) -> None:
    crowd.ask("a", crowd.locks.exclusive(stripes(0, 2)))
    crowd.ask("b", crowd.locks.exclusive(stripes(1, 3)))
    assert crowd.granted == ["a", "b"]


def test_writers_of_one_stripe_take_turns(crowd: Crowd) -> None:
    crowd.ask("a", crowd.locks.exclusive(stripes(0, 2)))
    crowd.ask("b", crowd.locks.exclusive(stripes(2, 3)))
    crowd.ask("c", crowd.locks.exclusive(stripes(2)))
    assert crowd.granted == ["a"]
    crowd.let_go("a")
    assert crowd.granted == ["a", "b"]
    crowd.let_go("b")
    assert crowd.granted == ["a", "b", "c"]


def test_readers_share_a_stripe(crowd: Crowd) -> None:
    crowd.ask("a", crowd.locks.shared(stripes(1)))
    crowd.ask("b", crowd.locks.shared(stripes(1, 2)))
    crowd.ask("writer", crowd.locks.exclusive(stripes(2)))
    assert crowd.granted == ["a", "b"]
    crowd.let_go("b")
    assert crowd.granted == ["a", "b", "writer"]


def test_a_waiting_writer_goes_before_later_readers(crowd: Crowd) -> None:
    crowd.ask("reader", crowd.locks.shared(stripes(1)))
    crowd.ask("writer", crowd.locks.exclusive(stripes(1)))
    crowd.ask("late reader", crowd.locks.shared(stripes(1)))
    crowd.ask("other", crowd.locks.exclusive(stripes(2)))
    assert crowd.granted == ["reader", "other"]
    crowd.let_go("reader")
    assert crowd.granted == ["reader", "other", "writer"]
    crowd.let_go("writer")
    assert crowd.granted == ["reader", "other", "writer", "late reader"]


def test_readers_go_before_later_writers(crowd: Crowd) -> None:
    crowd.ask("first", crowd.locks.exclusive(stripes(1)))
    crowd.ask("reader", crowd.locks.shared(stripes(1)))
    crowd.ask("writer", crowd.locks.exclusive(stripes(1)))
    crowd.let_go("first")
    assert crowd.granted == ["first", "reader"]


def test_a_large_request_is_not_overtaken_by_small_ones(crowd: Crowd) -> None:
    crowd.ask("small", crowd.locks.exclusive(stripes(0)))
    crowd.ask("large", crowd.locks.exclusive(stripes(0, 1, 2)))
    crowd.ask("later", crowd.locks.exclusive(stripes(2)))  # free, but the large one waits for it
    assert crowd.granted == ["small"]
    crowd.let_go("small")
    assert crowd.granted == ["small", "large"]


def test_everything_excludes_all(crowd: Crowd) -> None:
    crowd.ask("reader", crowd.locks.shared(stripes(5)))
    crowd.ask("all", crowd.locks.everything())
    crowd.ask("later", crowd.locks.shared(stripes(6)))
    assert crowd.granted == ["reader"]
    crowd.let_go("reader")
    assert crowd.granted == ["reader", "all"]
    crowd.let_go("all")
    assert crowd.granted == ["reader", "all", "later"]


def test_a_cut_has_what_earlier_writers_claim(crowd: Crowd) -> None:
    crowd.ask("writer", crowd.locks.exclusive(stripes(1)))
    crowd.ask("waiting", crowd.locks.exclusive(stripes(1, 2)))
    crowd.ask("reader", crowd.locks.shared(stripes(8)))
    hold = crowd.locks.cut(lambda: stripes(4), is_shared=False)
    crowd.ask("cut", hold)
    assert hold.stripes is not None
    assert hold.stripes.tolist() == [1, 2, 4]
    crowd.ask("late", crowd.locks.exclusive(stripes(4, 5)))
    crowd.ask("elsewhere", crowd.locks.exclusive(stripes(5)))  # behind "late"
    crowd.ask("free", crowd.locks.exclusive(stripes(6)))
    assert crowd.granted == ["writer", "reader", "free"]
    crowd.let_go("writer")
    crowd.let_go("waiting")
    assert crowd.granted[3:] == ["waiting", "cut"]
    crowd.let_go("cut")
    assert crowd.granted[5:] == ["late"]


def test_a_cut_behind_everything_is_everything(crowd: Crowd) -> None:
    crowd.ask("all", crowd.locks.everything())
    hold = crowd.locks.cut(lambda: stripes(4), is_shared=True)
    crowd.ask("cut", hold)
    assert hold.stripes is None
    assert crowd.granted == ["all"]


@pytest.mark.parametrize("is_granted_meanwhile", [False, True])
def test_ctrl_c_while_waiting(is_granted_meanwhile: bool) -> None:
    locks = StripeLocks(STRIPE_COUNT)
    first = locks.exclusive(stripes(1)).__enter__()
    hold = locks.exclusive(stripes(1, 2))

    class Interrupted:
        """The lock that is waited on, interrupted."""

        def acquire(self) -> None:
            if is_granted_meanwhile:
                first.__exit__(None, None, None)
            raise KeyboardInterrupt

        def release(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        calls = iter([Interrupted(), Interrupted()])
        patch.setattr(threading, "Lock", lambda: _FirstAcquired(next(calls)))
        with pytest.raises(KeyboardInterrupt):
            hold.__enter__()
    if not is_granted_meanwhile:
        first.__exit__(None, None, None)
    assert locks.waiting_count == 0
    with locks.everything():
        pass


class _FirstAcquired:
    """A lock whose first `acquire`, by who makes it, succeeds."""

    def __init__(self, then: object) -> None:
        self._then = then
        self._is_first = True

    def acquire(self) -> None:
        if self._is_first:
            self._is_first = False
            return
        self._then.acquire()

    def release(self) -> None:
        self._then.release()


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["shared", "exclusive", "everything", "cut", "shared cut"]),
        st.sets(st.integers(0, STRIPE_COUNT - 1), min_size=1),
    ),
    min_size=2,
    max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(requests=REQUESTS, seed=st.integers(0, 99))
def test_a_crowd_never_conflicts_and_always_ends(
    requests: list[tuple[str, set[int]]], seed: int
) -> None:
    locks = StripeLocks(STRIPE_COUNT)
    holding: list[tuple[bool, set[int]]] = []
    watch = threading.Lock()
    faults: list[object] = []

    def ask(kind: str, numbers: set[int]) -> Hold:
        wanted = stripes(*sorted(numbers))
        makers: dict[str, Callable[[], Hold]] = {
            "shared": lambda: locks.shared(wanted),
            "exclusive": lambda: locks.exclusive(wanted),
            "everything": locks.everything,
            "cut": lambda: locks.cut(lambda: wanted, is_shared=False),
            "shared cut": lambda: locks.cut(lambda: wanted, is_shared=True),
        }
        return makers[kind]()

    def run(number: int) -> None:
        chance = random.Random(seed + number)
        for _ in range(6):
            kind, numbers = chance.choice(requests)
            with ask(kind, numbers) as hold:
                is_shared = hold.is_shared and hold.stripes is not None
                found = range(STRIPE_COUNT) if hold.stripes is None else hold.stripes.tolist()
                mine = is_shared, set(found)
                with watch:
                    for other_is_shared, theirs in holding:
                        if not (is_shared and other_is_shared) and theirs & mine[1]:
                            faults.append((mine, theirs))
                    holding.append(mine)
                with watch:
                    holding.remove(mine)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(4)]
    with ExitStack() as stack:
        for thread in threads:
            thread.start()
            stack.callback(thread.join, TIMEOUT_S)
    assert not [thread for thread in threads if thread.is_alive()]
    assert not faults
    assert locks.waiting_count == 0
