"""Goal: attempts go on while a shard is away, no longer than the deadline, and never in a hurry.

Method: a world with a clock of its own, in which pausing and waiting take no time at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shardwell.errors import (
    ArgumentError,
    ClosedError,
    CorruptChunkError,
    DeadlineError,
    NotInitializedError,
    SessionUnknownError,
    ShardUnavailableError,
    ShardwellError,
    StepOrderError,
    UnknownParameterError,
    WorkersMissingError,
    WrongShardError,
)
from shardwell.rpc.retry import (
    CORRUPT_RETRY_COUNT_MAX,
    PAUSE_S_FIRST,
    PAUSE_S_MAX,
    UNKNOWN_PAUSE_S_MAX,
    Attempts,
)

FOREVER_S = 1e9


class World:
    """Surroundings whose shards are away until a moment, and whose waits advance its clock."""

    def __init__(
        self, *, back_s: float = 0.0, jitter: float = 1.0, answer_s: float = 0.001
    ) -> None:
        self.time_s = 1000.0
        self.back_s = 1000.0 + back_s
        self.pauses_s: list[float] = []
        self.awaited: list[tuple[int, float]] = []
        self.closed = False
        self._jitter = jitter
        self._answer_s = answer_s

    def now_s(self) -> float:
        return self.time_s

    def jitter(self) -> float:
        return self._jitter

    def pause(self, duration_s: float) -> None:
        if self.closed:
            raise ClosedError("closed")
        assert duration_s >= 0
        self.pauses_s.append(duration_s)
        self.time_s += duration_s

    def replace_older(self) -> bool:
        return False

    def await_shard(self, shard_index: int, timeout_s: float) -> bool:
        assert timeout_s > 0
        self.awaited.append((shard_index, timeout_s))
        self.time_s += min(max(self.back_s - self.time_s, 0.0) + self._answer_s, timeout_s)
        return self.time_s >= self.back_s

    def describe(self, shard_index: int) -> str:
        return f"shard {shard_index} at host:7{shard_index}"


def unavailable(shard_index: int | None = 1) -> ShardUnavailableError:
    return ShardUnavailableError("it went away", shard_index=shard_index, parameter="m")


def failing(*errors: ShardwellError, then: str = "done") -> Callable[[], str]:
    """An attempt that raises each error once, and succeeds after."""
    left: Iterator[ShardwellError] = iter(errors)

    def attempt() -> str:
        for error in left:
            raise error
        return then

    return attempt


def test_success_costs_no_wait() -> None:
    world = World()
    assert Attempts(5.0, world).run(failing()) == "done"
    assert (world.pauses_s, world.awaited) == ([], [])


def test_it_waits_until_the_shard_is_back() -> None:
    world = World(back_s=7.0)
    assert Attempts(20.0, world).run(failing(unavailable(3))) == "done"
    assert world.pauses_s == [PAUSE_S_FIRST]
    assert [index for index, _ in world.awaited] == [3]
    assert 7.0 <= world.time_s - 1000 < 7.1


def test_each_shard_that_is_lost_is_waited_for() -> None:
    world = World()
    run = Attempts(20.0, world).run
    assert run(failing(unavailable(0), unavailable(2), unavailable(0))) == "done"
    assert [index for index, _ in world.awaited] == [0, 2, 0]


def test_pauses_double_up_to_a_bound_with_full_jitter() -> None:
    for jitter in (0.0, 0.25, 1.0):
        world = World(jitter=jitter)
        Attempts(FOREVER_S, world).run(failing(*[unavailable() for _ in range(9)]))
        bounds = [min(PAUSE_S_FIRST * 2**n, PAUSE_S_MAX) for n in range(9)]
        assert world.pauses_s == pytest.approx([jitter * bound for bound in bounds])
        assert max(bounds) == PAUSE_S_MAX


def test_a_shard_that_was_there_for_a_while_is_a_new_failure() -> None:
    world = World()

    def attempt() -> str:
        if len(world.pauses_s) < 5:
            if len(world.pauses_s) == 3:
                world.time_s += PAUSE_S_MAX + 0.1
            raise unavailable()
        return "done"

    Attempts(FOREVER_S, world).run(attempt)
    assert world.pauses_s == pytest.approx([0.05, 0.1, 0.2, 0.05, 0.1])


def test_a_shard_that_does_not_know_the_session_is_asked_again_soon() -> None:
    """Also after it was away for long; and one that is away then is not."""
    world = World()
    unknown = SessionUnknownError("attend", shard_index=1)
    errors = [*[unavailable() for _ in range(7)], *[unknown] * 4, unavailable(), unavailable()]
    Attempts(FOREVER_S, world).run(failing(*errors))
    assert world.pauses_s[:7] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert world.pauses_s[7:] == pytest.approx([UNKNOWN_PAUSE_S_MAX] * 4 + [0.4, 0.8])


def test_a_shard_that_answers_the_question_alone_is_not_asked_in_a_hurry() -> None:
    """At most so many attempts, whatever the jitter: here it is drawn as its mean."""
    world = World(jitter=0.5)
    count = 0

    def attempt() -> str:
        nonlocal count
        count += 1
        raise unavailable()

    with pytest.raises(ShardUnavailableError):
        Attempts(60.0, world).run(attempt)
    assert 60 < count < 70


@pytest.mark.parametrize("timeout_s", [0.01, 0.4, 30.0])
def test_the_deadline_names_shard_address_time_and_what_to_do(timeout_s: float) -> None:
    world = World(back_s=FOREVER_S)
    with pytest.raises(ShardUnavailableError) as caught:
        Attempts(timeout_s, world).run(failing(unavailable(1)))
    error = caught.value
    assert (error.shard_index, error.parameter, error.retryable) == (1, "m", True)
    for part in ("shard 1 at host:71", "it went away", f"waited {timeout_s:.3g} s", "timeout_s"):
        assert part in error.message
    assert world.time_s - 1000 == pytest.approx(timeout_s)


def test_what_the_message_has_is_not_said_twice() -> None:
    world = World(back_s=FOREVER_S)
    words = "shard 1 at host:71 is gone; start it, or raise timeout_s"
    with pytest.raises(ShardUnavailableError) as caught:
        Attempts(2.0, world).run(failing(ShardUnavailableError(words, shard_index=1)))
    assert caught.value.message == f"waited 2 s: {words}"


def test_no_attempt_begins_after_the_deadline() -> None:
    world = World()

    def attempt() -> str:
        assert world.time_s < 1000 + 3.0
        world.time_s += 0.4
        raise unavailable()

    with pytest.raises(ShardUnavailableError):
        Attempts(3.0, world).run(attempt)
    assert world.time_s - 1000 <= 3.4


def test_the_rest_shrinks_and_is_never_nothing() -> None:
    world = World()
    attempts = Attempts(3.0, world)
    assert (attempts.rest_s, attempts.remaining_s) == (3.0, 3.0)
    world.time_s += 2.0
    assert (attempts.rest_s, attempts.remaining_s) == (1.0, 1.0)
    world.time_s += 5.0
    assert attempts.remaining_s == -4.0
    assert 0 < attempts.rest_s < 0.1


def test_one_deadline_for_all_parts_of_a_call() -> None:
    world = World(back_s=4.0)
    attempts = Attempts(5.0, world)
    attempts.run(failing(unavailable()))
    world.back_s = FOREVER_S
    with pytest.raises(ShardUnavailableError):
        attempts.run(failing(unavailable()))
    assert world.time_s - 1000 == pytest.approx(5.0)


@pytest.mark.parametrize(
    "kind",
    [
        UnknownParameterError,
        StepOrderError,
        WrongShardError,
        NotInitializedError,
        WorkersMissingError,
        ArgumentError,
        ClosedError,
    ],
)
def test_what_is_not_about_being_there_is_raised_at_once(kind: type[ShardwellError]) -> None:
    world = World()
    error = kind("what", shard_index=1)
    with pytest.raises(kind) as caught:
        Attempts(5.0, world).run(failing(error))
    assert caught.value is error
    assert world.pauses_s == []


def test_the_error_of_no_answer_has_the_time() -> None:
    world = World()

    def attempt() -> str:
        world.time_s += 5.0
        raise DeadlineError("shard 1 at host:71 did not answer", shard_index=1)

    with pytest.raises(DeadlineError, match=r"waited 5 s: shard 1 at host:71 did not") as caught:
        Attempts(5.0, world).run(attempt)
    assert type(caught.value) is DeadlineError
    assert caught.value.shard_index == 1


def test_damaged_chunks_are_sent_again_a_few_times() -> None:
    world = World()
    damaged = [CorruptChunkError("CRC32C", shard_index=1) for _ in range(10)]
    attempts = Attempts(5.0, world)
    assert attempts.run(failing(*damaged[:CORRUPT_RETRY_COUNT_MAX])) == "done"
    assert world.awaited == []
    assert len(world.pauses_s) == CORRUPT_RETRY_COUNT_MAX
    with pytest.raises(CorruptChunkError):
        Attempts(5.0, world).run(failing(*damaged[: CORRUPT_RETRY_COUNT_MAX + 1]))


def test_an_unknown_shard_is_paused_for() -> None:
    world = World()
    assert Attempts(5.0, world).run(failing(unavailable(None))) == "done"
    assert (world.pauses_s, world.awaited) == ([PAUSE_S_FIRST], [])
    with pytest.raises(ShardUnavailableError, match="it went away"):
        Attempts(0.01, World(back_s=FOREVER_S)).run(failing(*[unavailable(None)] * 3))


def test_close_raises_its_own_error_also_after_the_deadline() -> None:
    for timeout_s in (5.0, 0.5):
        world = World()

        def attempt(world: World = world) -> str:
            world.time_s += 1.0
            world.closed = True
            raise unavailable()

        with pytest.raises(ClosedError):
            Attempts(timeout_s, world).run(attempt)


def test_a_pause_of_the_callers_ends_with_the_deadline() -> None:
    world = World()
    attempts = Attempts(1.0, world)
    attempts.pause(0.4)
    attempts.pause(3.0)
    attempts.pause(3.0)
    assert world.pauses_s == pytest.approx([0.4, 0.6, 0.0])


@pytest.mark.parametrize("is_part", [False, True])
def test_missing_workers_are_named_with_the_timeout_that_the_caller_gave(is_part: bool) -> None:
    world = World()

    def attempt() -> str:
        world.time_s += 5.0
        raise WorkersMissingError("waited 4.993 s for version 1; raise timeout_s")

    attempts = Attempts(5.0, world)
    with pytest.raises(WorkersMissingError, match=r"^waited 5 s for version 1; raise timeout_s$"):
        (attempts.beside() if is_part else attempts).run(attempt)


def test_missing_workers_are_named_with_the_shard_s_shorter_time() -> None:
    def attempt() -> str:
        raise WorkersMissingError("waited 100 s for version 1; raise timeout_s")

    with pytest.raises(WorkersMissingError, match=r"^waited 100 s for version 1"):
        Attempts(500.0, World()).run(attempt)
