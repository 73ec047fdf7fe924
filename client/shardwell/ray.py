"""Shardwell on Ray; needs the extra `ray`.

with shardwell.ray.start_shards(2, data_dir="/shared/run-7") as cluster:
    TorchTrainer(train, train_loop_config={"cluster": cluster}, ...).fit()

In the workers: `shardwell.connect(config["cluster"].target, worker_id=...)`. Shards are the
service's matter, so this is the one module of the SDK that imports it; nothing imports this one.
"""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "shardwell.ray needs Ray: pip install 'shardwell[ray]'", name="ray"
    ) from None

from shardwell_server.ray_cluster import RayCluster, start_shards

__all__ = ["RayCluster", "start_shards"]
