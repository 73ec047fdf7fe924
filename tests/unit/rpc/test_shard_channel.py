"""Goal: calls are made over the newest channel, and answers that no one can read are errors.

Method: gRPC's calls are made by stand-ins, one of which renews the channel, as another thread may.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwell.errors import ShardUnavailableError
from shardwell.rpc import shard_channel
from shardwell.rpc.shard_channel import ShardChannel

METHOD = "GetStatus"


@pytest.fixture
def channel(monkeypatch):
    made = ShardChannel(0, "127.0.0.1:1")
    monkeypatch.setattr(made._channel, "renew", lambda: True)
    yield made
    made.close()


def test_a_call_over_a_channel_of_before_is_not_kept(monkeypatch, channel) -> None:
    def unary(_: Any, __: str) -> object:
        if not made:
            channel._renew()
        made.append(object())
        return made[-1]

    made: list[object] = []
    monkeypatch.setattr(shard_channel, "_unary", unary)
    assert channel.unary(METHOD) is made[0]
    assert channel.unary(METHOD) is made[1]
    assert channel.unary(METHOD) is made[1]


def test_a_call_is_there_whenever_the_channel_is_renewed(channel) -> None:
    class Renewing(dict[str, Any]):
        def __setitem__(self, method: str, stub: Any) -> None:
            super().__setitem__(method, stub)
            channel._renew()

    channel._stubs = Renewing()
    assert callable(channel.unary(METHOD))


def test_a_recording_that_is_damaged_on_its_way(monkeypatch, channel) -> None:
    monkeypatch.setattr(channel, "streaming", lambda _: lambda *_, **__: iter([b"\xff"]))
    with pytest.raises(ShardUnavailableError, match="was lost; call again"):
        list(channel.record(0.0, 1.0))
