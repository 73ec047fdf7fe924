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
    made, counts = ShardChannel.delete, itertools.count(1)

    def delete(channel: ShardChannel, request: Any, timeout_s: float) -> Any:
        answer = made(channel, request, timeout_s)
        if next(counts) == number:
            act()
        return answer

    monkeypatch.setattr(ShardChannel, "delete", delete)


def requests_of(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> list[tuple[ShardChannel, Any]]:
    """What a deletion sends, to be sent again."""
    sent: list[tuple[ShardChannel, Any]] = []
    made = ShardChannel.delete

    def delete(channel: ShardChannel, request: Any, timeout_s: float) -> Any:
        sent.append((channel, type(request).FromString(request.SerializeToString())))
        return made(channel, request, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(ShardChannel, "delete", delete)
        act()
    return sent
