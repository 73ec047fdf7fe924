"""A client that deletes or renames, stopped between two of its requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from shardwell.rpc.shard_channel import ShardChannel

REQUEST_COUNT = 5
"""Of a change on two shards: both are looked at, shard 0 marks, both free the name."""


class EndedError(BaseException):
    """The client's process ends here."""


def end() -> None:
    """Ends the client."""
    raise EndedError


def after_requests(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Calls `act` when a change has had so many answers."""
    made, counts = ShardChannel.change_name, itertools.count(1)

    def change_name(channel: ShardChannel, request: Any, timeout_s: float) -> Any:
        answer = made(channel, request, timeout_s)
        if next(counts) == number:
            act()
        return answer

    monkeypatch.setattr(ShardChannel, "change_name", change_name)


def requests_of(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]
) -> list[tuple[ShardChannel, Any]]:
    """What a change sends, to be sent again."""
    sent: list[tuple[ShardChannel, Any]] = []
    made = ShardChannel.change_name

    def change_name(channel: ShardChannel, request: Any, timeout_s: float) -> Any:
        sent.append((channel, type(request).FromString(request.SerializeToString())))
        return made(channel, request, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(ShardChannel, "change_name", change_name)
        change()
    return sent
