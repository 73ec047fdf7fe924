"""Shardwell on Ray; needs the extra `ray`.

with shardwell.ray.start_shards(2, data_dir="/shared/run-7") as cluster:
    TorchTrainer(train, train_loop_config={"cluster": cluster}, ...).fit()

In the workers: `shardwell.connect(config["cluster"].target, worker_id=...)`. Shards are the
service's matter, so this is the one module of the SDK that imports it; nothing imports this one.
"""

from shardwell.process.environment import install_command

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        f"shardwell.ray needs Ray; run: {install_command('ray>=2.40')}", name="ray"
    ) from None

from shardwell_server.ray_cluster import RayCluster, start_shards

__all__ = ["RayCluster", "start_shards"]
