"""The demo's own error."""

from __future__ import annotations

from shardwell.errors import ShardwellError


class DemoError(ShardwellError):
    """The demo can't begin or go on: scikit-learn is missing, or a worker or a shard has ended."""
