"""Workers that reduce among themselves: a weighted mean, and going on when one is gone.

shardwell run -n 4 -- python examples/group.py
"""

import numpy as np

import shardwell

with shardwell.join_group(strategy=shardwell.Ring()) as group:
    gradient = np.full((2, 3), float(group.rank), np.float32)
    group.all_reduce(gradient, op="mean", sample_count=group.rank)  # rank 0 has no samples
    print(gradient[0])  # with 4 ranks: close to 7/3

    future = group.all_reduce_async(np.ones(1000, np.float32))  # compute meanwhile
    future.result()

    for batch in range(3 - group.rank % 2):  # odd ranks have a batch less
        loss = np.array([1.0 + batch], np.float32)
        group.all_reduce(loss, op="mean")
    last = group.join()  # even ranks went on; now all are together again
    group.broadcast(loss, root=last, codec="fp32")
    print(loss)  # [3.] on every rank
