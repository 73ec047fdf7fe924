"""The smallest worker: linear regression on a running cluster.

shardwell cluster --shard-count 2     # prints: export SHARDWELL_SHARDS=...
python examples/worker.py             # with that variable set
"""

import numpy as np

import shardwell

rng = np.random.default_rng(0)
inputs = rng.standard_normal((256, 8), np.float32)
targets = inputs @ np.arange(8, dtype=np.float32)

with shardwell.connect(worker_id="w0") as client, shardwell.LeaveRequest() as request:
    model = client.parameter("worker-line", size=8, optimizer=shardwell.SGD(learning_rate=0.1))
    model.init(np.zeros(8, np.float32))
    weights = model.get_weights(min_version=model.next_step)  # started again, it goes on
    for _ in range(model.next_step, 100):
        request.check()  # SIGTERM ends it here, between two steps, with the exit code 143
        gradient = inputs.T @ (inputs @ weights - targets) / len(inputs)
        weights = model.exchange(gradient, sample_count=len(inputs))
    print(weights.round(3))
