"""A process that restores a checkpoint, and is killed at a chosen instant of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import shardwell
from shardwell.checkpoint.restore import _UploadStream
from shardwell.parameter.first_weights import FirstWeights
from shardwell.rpc.shard_channel import ShardChannel


def restore(target: str, path: str, instant: int, chosen: dict[str, Any]) -> None:
    """Restores it; ends by SIGKILL before or after the call, or message, of that number."""
    reached_count = 0

    def reached() -> None:
        nonlocal reached_count
        if reached_count == instant:
            os.kill(os.getpid(), signal.SIGKILL)
        reached_count += 1

    call = ShardChannel.call

    def counted_call(self: ShardChannel, *arguments: Any, **named: Any) -> Any:
        reached()
        answer: Any = call(self, *arguments, **named)
        reached()
        return answer

    def counted(messages: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
        def each(*arguments: Any) -> Iterator[bytes]:
            for message in messages(*arguments):
                reached()
                yield message
            reached()

        return each

    with shardwell.connect(target, worker_id="restorer") as client:
        patched: Any = ShardChannel
        patched.call = counted_call
        for kind in (FirstWeights, _UploadStream):
            changed: Any = kind
            changed._messages = counted(changed._messages)
        client.restore_checkpoint(path, **chosen)
    print(f"restored after {reached_count} instants", flush=True)
