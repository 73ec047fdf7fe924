"""The service: shards that own slices of parameters, and ways to start them."""

from shardwell_server.app import ShardServer
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.local_cluster import LocalCluster

__all__ = ["Limits", "LocalCluster", "ShardConfig", "ShardServer"]
