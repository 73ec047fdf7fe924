"""An all-reduce through the shards: the weights of an `Average` parameter are the mean gradient.

shardwell cluster --shard-count 2     # prints: export SHARDWELL_SHARDS=...
python examples/all_reduce.py         # with that variable set
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import shardwell

WORKER_COUNT = 4


def worker(index: int) -> np.ndarray:
    with shardwell.connect(worker_id=f"w{index}") as client:
        mean = client.parameter(
            "all-reduce-mean",
            size=5,
            optimizer=shardwell.Average(),
            worker_count=WORKER_COUNT,
            codec="fp32",
        )
        return mean.exchange(np.full(5, float(index), np.float32))


with ThreadPoolExecutor(WORKER_COUNT) as threads:
    for mean in threads.map(worker, range(WORKER_COUNT)):
        print(mean)  # [1.5 1.5 1.5 1.5 1.5] from each
