"""Asks many shards, or does many small things with them, at once instead of one after another."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from shardwell.threads.calls import CallPart, current_call
from shardwell.threads.pool import together

_THREAD_COUNT_MAX = 8
"""The threads of one call: as many as a shard answers without hurting others."""
_TOGETHER_BYTES_MAX = 8 << 20
"""Larger things fill the wire alone."""

GivenT = TypeVar("GivenT")
AnswerT = TypeVar("AnswerT")


def done_at_once(
    name: str,
    given: Sequence[GivenT],
    act: Callable[[GivenT], AnswerT],
    stop: Callable[[], object],
) -> list[AnswerT]:
    """Returns the results of `act` for each of `given`, in order, on threads of that name.

    After a failure nothing more is begun, `stop` ends what is under way, and its end is waited for.
    """
    answers: dict[int, AnswerT] = {}
    failures: list[BaseException] = []
    left = deque(range(len(given)))

    def work() -> None:
        while left and not failures:
            try:
                index = left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                answers[index] = act(given[index])
            except BaseException as error:
                failures.append(error)
                stop()

    try:
        together(name, work, min(len(given), _THREAD_COUNT_MAX) - 1)
    except BaseException:  # of a signal: those of `act` are failures
        left.clear()
        stop()
        raise
    try:
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # which the error's traceback would hold
    return [answers[index] for index in range(len(given))]


def ask_all(given: Sequence[GivenT], ask: Callable[[GivenT], AnswerT]) -> list[AnswerT]:
    """Returns the results of `ask` for each of `given`, in order; some are asked at once.

    Each is a part of the call that this thread runs, and is cancelled with it, and after a failure.
    """
    if len(given) < 2:
        return [ask(each) for each in given]
    call = current_call()
    parts = [CallPart(call) for _ in given]

    def asked(index: int) -> AnswerT:
        with parts[index].running():
            return ask(given[index])

    def cancel() -> None:
        for part in parts:
            part.cancel()

    return done_at_once("shardwell-asking", range(len(given)), asked, cancel)


def batches(
    given: Sequence[GivenT], size_bytes: Callable[[GivenT], int]
) -> Iterator[Sequence[GivenT]]:
    """Cuts `given` for `ask_all`, in order: small ones together, each large one alone."""
    for is_large, group in itertools.groupby(
        given, lambda each: size_bytes(each) > _TOGETHER_BYTES_MAX
    ):
        members = list(group)
        yield from ([each] for each in members) if is_large else [members]
