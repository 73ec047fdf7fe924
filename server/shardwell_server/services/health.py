"""grpc.health.v1, which everybody may ask: so it must not be what keeps others out."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health

_WATCH_COUNT_MAX = 16
"""Calls that stay open to be told of changes, each one of those that a shard takes at once."""


class BoundedHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """gRPC's own, with a bound. For the loop's thread."""

    def __init__(self) -> None:
        super().__init__()
        self._watch_count = 0

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """As gRPC's; refused where as many watch."""
        if self._watch_count >= _WATCH_COUNT_MAX:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_WATCH_COUNT_MAX} calls watch already; ask again and again (Check) instead",
            )
        self._watch_count += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watch_count -= 1
