"""A worker on a machine that may be taken away: others come, leave and die while it trains.

shardwell cluster --shard-count 2     # prints: export SHARDWELL_SHARDS=...
python examples/spot_worker.py w0     # with that variable set; w1, w2 beside it, at any time
"""

import sys

import numpy as np

import shardwell

worker_id = sys.argv[1] if len(sys.argv) > 1 else "w0"
rng = np.random.default_rng(sum(worker_id.encode()))  # each draws samples of its own

with shardwell.connect(worker_id=worker_id) as client, shardwell.LeaveRequest() as request:
    model = client.parameter(
        "spot-line",
        size=8,
        optimizer=shardwell.SGD(learning_rate=0.1),
        members=shardwell.Elastic(min_count=1, max_count=64),
    )
    model.init(np.zeros(8, np.float32))  # the first worker's count
    weights = model.get_weights()
    while model.next_step < 300 and not request.has_come:  # the cluster's step; SIGTERM
        inputs = rng.standard_normal((32, 8), np.float32)
        gradient = inputs.T @ (inputs @ weights - inputs @ np.arange(8)) / len(inputs)
        weights = model.exchange(gradient, sample_count=len(inputs))
        assert model.outcome is not None
        if model.next_step % 50 == 0:
            print(f"step {model.next_step} has {', '.join(model.outcome.contributors)} so far")
    print(weights.round(3))
