"""A cluster inside a test or a notebook; nothing to start beforehand.

python examples/local_cluster.py
"""

import numpy as np

import shardwell
from shardwell_server import LocalCluster

with (
    LocalCluster(shard_count=3) as cluster,
    shardwell.connect(cluster.target, worker_id="notebook") as client,
):
    model = client.parameter("local-model", size=10, optimizer=shardwell.Adam(learning_rate=0.1))
    model.init(np.ones(10, np.float32))
    step = model.put_gradient(np.ones(10, np.float32))
    print(model.get_weights(min_version=step + 1))  # ten times 0.9
