"""Asks many shards, or does many small things with them, at once instead of one after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

from shardwell.threads.calls import CallPart, current_call
from shardwell.threads.daemon_threads import DaemonThreads

_THREAD_COUNT_MAX = 8
"""The threads of one call: as many as a shard answers without hurting others."""

_TOGETHER_BYTES_MAX = 8 << 20
"""Larger things fill the wire alone."""

GivenT = TypeVar("GivenT")
AnswerT = TypeVar("AnswerT")


def ask_all(given: Sequence[GivenT], ask: Callable[[GivenT], AnswerT]) -> list[AnswerT]:
    """The results of `ask` for each of `given`, in their order; some are asked at once.

    Each is a part of the call that this thread runs, and is cancelled with it. After a failure
    nothing more is begun, what is under way is cancelled, and its end waited for.
    """
    if len(given) < 2:
        return [ask(each) for each in given]
    call = current_call()
    parts = [CallPart(call) for _ in given]

    def asked(part: CallPart, each: GivenT) -> AnswerT:
        with part.running():
            return ask(each)

    thread_count = min(len(given), _THREAD_COUNT_MAX)
    pool = DaemonThreads(thread_count, "shardwell-asking", lends_callers=True)
    try:
        futures: list[Future[AnswerT]] = [
            pool.submit(asked, part, each) for part, each in zip(parts, given, strict=True)
        ]
        ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failures = [future.exception() for future in futures if future in ended]
    except BaseException:  # no thread can be started
        pool.shutdown(wait=False, cancel_futures=True)
        _cancel(parts)
        raise
    failure = next(filter(None, failures), None)
    if failure is not None:
        pool.shutdown(wait=False, cancel_futures=True)
        _cancel(parts)
    pool.shutdown()
    if failure is not None:
        raise failure
    return [future.result() for future in futures]


def batches(
    given: Sequence[GivenT], size_bytes: Callable[[GivenT], int]
) -> Iterator[Sequence[GivenT]]:
    """All of `given` in order, cut for `ask_all`: small ones together, each large one alone."""
    for is_large, group in itertools.groupby(
        given, lambda each: size_bytes(each) > _TOGETHER_BYTES_MAX
    ):
        members = list(group)
        yield from ([each] for each in members) if is_large else [members]


def _cancel(parts: Sequence[CallPart]) -> None:
    for part in parts:
        part.cancel()
