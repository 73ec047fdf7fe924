"""A client that deletes, stopped between two of its requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from shardwell.rpc.shard_channel import ShardChannel

REQUEST_COUNT = 5
"""Of a deletion on two shards: both are looked at, shard 0 marks, both free the name."""


class EndedError(BaseException):
    """The client's process ends here."""


def end() -> None:
    """Ends the client."""
    raise EndedError


def after_requests(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Calls `act` when a deletion has had so many answers."""
    made, counts = ShardChannel.call, itertools.count(1)

    def call(channel: ShardChannel, method: str, *request: Any, **how: Any) -> Any:
        answer = made(channel, method, *request, **how)
        if method == "Delete" and next(counts) == number:
            act()
        return answer

    monkeypatch.setattr(ShardChannel, "call", call)


def requests_of(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> list[tuple[ShardChannel, Any]]:
    """What a deletion sends, to be sent again."""
    sent: list[tuple[ShardChannel, Any]] = []
    made = ShardChannel.call

    def call(channel: ShardChannel, method: str, request: Any, *rest: Any, **how: Any) -> Any:
        if method == "Delete":
            sent.append((channel, type(request).FromString(request.SerializeToString())))
        return made(channel, method, request, *rest, **how)

    with monkeypatch.context() as patch:
        patch.setattr(ShardChannel, "call", call)
        act()
    return sent
