"""What it costs a shard to be scraped and looked at: processor time of a request to its admin port.

Processor time, as a share of a core at one request a second: other work on the machine changes it
little. It includes the client and HTTP of both sides, which run in this process.

    python benchmarks/admin.py
"""

from __future__ import annotations

import threading
import time
import urllib.request

import numpy as np

import shardwell
from shardwell_server import LocalCluster

WORKER_COUNT = 8
NAMES = ("a", "b", "c")
SIZE = 3_000_000
REQUEST_COUNT = 100


def train(client: shardwell.Client) -> None:
    """A few steps of each parameter, so that there is something to tell."""
    adam = shardwell.Adam(learning_rate=0.01)
    for name in NAMES:
        net = client.parameter(name, size=SIZE, optimizer=adam, worker_count=WORKER_COUNT)
        net.init(np.zeros(SIZE, np.float32))
        for _ in range(3):
            net.exchange(np.ones(SIZE, np.float32))


def main() -> None:
    """Prints a line for what Prometheus reads, and for what the page does."""
    with LocalCluster(2, admin_listen="127.0.0.1:0") as cluster:
        clients = [
            shardwell.connect(cluster.target, worker_id=f"w{rank}") for rank in range(WORKER_COUNT)
        ]
        threads = [threading.Thread(target=train, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"{len(NAMES)} parameters, {WORKER_COUNT} workers, 2 shards")
        for path in ("metrics", "status.json"):
            url = cluster.admin_urls[0] + path
            urllib.request.urlopen(url).read()
            began_s = time.process_time()
            for _ in range(REQUEST_COUNT):
                size = len(urllib.request.urlopen(url).read())
            spent_ms = 1000 * (time.process_time() - began_s) / REQUEST_COUNT
            print(f"  /{path:12} {spent_ms:5.2f} ms, {size:7,} bytes")
        for client in clients:
            client.close()


if __name__ == "__main__":
    main()
