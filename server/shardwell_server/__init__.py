"""The service: shards that own slices of parameters, and ways to start them."""

from __future__ import annotations

import sys

# `python -m shardwell_server` puts the working directory on the path, where a file called token.py
# is the user's, and none of Python's modules. It goes before anything that could import one.
if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[len(sys.orig_argv) - len(sys.argv)] == __name__
    and not sys.flags.safe_path
):
    del sys.path[0]

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as in shardwell, before gRPC is imported

if TYPE_CHECKING:
    from shardwell_server.accumulator import MmapGradientAccumulator
    from shardwell_server.config import Limits, ShardConfig
    from shardwell_server.group_cluster import GroupCluster
    from shardwell_server.local_cluster import LocalCluster
    from shardwell_server.server import ShardServer

__all__ = [
    "GroupCluster",
    "Limits",
    "LocalCluster",
    "MmapGradientAccumulator",
    "ShardConfig",
    "ShardServer",
]

# What a shard refuses or meets is an error of some client's, or in a log that a command shows.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOMES = {
    "GroupCluster": "group_cluster",
    "Limits": "config",
    "LocalCluster": "local_cluster",
    "MmapGradientAccumulator": "accumulator",
    "ShardConfig": "config",
    "ShardServer": "server",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that short commands start quickly."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
