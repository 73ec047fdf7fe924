"""The states of trainings on their way to shard 0 and back: a beginning, and pages by digest.

Steps of `bring`, until the shard has kept the state:

    the shard answers          next
    nothing is missing         kept
    pages are missing          they are brought; then asked again
    others bring the rest      asked again, after a pause
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shardwell.errors import CorruptChunkError, DeadlineError
from shardwell.rpc.retry import Attempts
from shardwell.specs.parameter import STATE_PAGE_MAX_BYTES, STATE_SIZE_MAX_BYTES
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire.state_tree import digest_of, pages_of

_Stage = pb.KeepStateRequest
_PAUSE_S = 0.02


class Ask(Protocol):
    """A call of KeepState, for one parameter and worker."""

    def __call__(self, **fields: Any) -> pb.KeepStateResponse:
        """Makes it with these fields of the request besides."""


def bring(ask: Ask, stage: Any, step: int, state: bytes, attempts: Attempts) -> None:
    """Has shard 0 keep a state.

    Raises:
        DeadlineError: pages were missing until the deadline.
        CorruptChunkError: the shard lacks pages that the state has not.
    """
    beginning, *pages = pages_of(state, STATE_PAGE_MAX_BYTES)
    digests = [digest_of(each) for each in pages]
    while True:
        answer = ask(stage=stage, step=step, state=bytes(beginning), pages=digests)
        if not answer.missing and not answer.is_awaited:
            return
        if any(index >= len(pages) for index in answer.missing):
            raise CorruptChunkError(f"shard 0 lacks a page of a state that has {len(pages)}")
        if attempts.remaining_s <= 0:
            raise DeadlineError(
                f"shard 0 has not kept a state of {len(state)} bytes within "
                f"{attempts.timeout_s:g} s; keep less with keep_state(), or raise timeout_s"
            )
        for index in answer.missing:
            ask(stage=_Stage.STAGE_PUT_PAGE, step=step, state=bytes(pages[index]))
        if not answer.missing:
            attempts.pause(_PAUSE_S)


def fetched(ask: Callable[..., pb.KeepStateResponse], answer: pb.KeepStateResponse) -> bytes | None:
    """Returns the bytes of a state that STAGE_GET has answered; None: it has been replaced.

    Raises:
        CorruptChunkError: a page is another one.
    """
    parts = [answer.state]
    for digest in answer.pages:
        page = ask(stage=_Stage.STAGE_GET_PAGE, pages=[digest]).state
        if not page:
            return None
        if digest_of(page) != digest:
            raise CorruptChunkError("a page of a state has another digest than shard 0 has named")
        parts.append(page)
        if sum(map(len, parts)) > STATE_SIZE_MAX_BYTES:
            raise CorruptChunkError(f"a state has more than {STATE_SIZE_MAX_BYTES} bytes")
    return b"".join(parts)
