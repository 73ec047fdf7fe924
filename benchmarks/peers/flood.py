"""A tenant that asks for more than it may have: as many calls as are answered, until it is killed.

    python flood.py --shards TARGET --kind payload|calls|connections

payload: exchanges of 16 MB by four threads; calls: 64 status calls under way at all times;
connections: clients that connect and go.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading

import grpc
import numpy as np

import shardwell
from shardwell.connection.credentials import TokenFile, token_file
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum

SIZE = 4_000_000
THREAD_COUNT = 4
CALL_COUNT = 64
SGD = shardwell.SGD(learning_rate=0.01)
STATUS = "/shardwell.v1.ParameterServerService/GetStatus"


def payload(target: str, number: int, over: threading.Event) -> None:
    with shardwell.connect(target, worker_id=f"flood-{number}", timeout_s=600) as client:
        model = client.parameter(f"flood-{number}", size=SIZE, optimizer=SGD)
        model.init(np.zeros(SIZE, np.float32))
        gradient = np.full(SIZE, 0.01, np.float32)
        while not over.is_set():
            with contextlib.suppress(shardwell.ShardwellError):
                model.exchange(gradient)


def calls(target: str, number: int, over: threading.Event) -> None:
    token = token_file(None)
    assert isinstance(token, TokenFile)
    metadata = (("authorization", token.authorization()),)
    with grpc.insecure_channel(target.split(",")[number % (target.count(",") + 1)]) as channel:
        ask = channel.unary_unary(STATUS)
        request = checksum.sealed(pb.GetStatusRequest())
        room = threading.Semaphore(CALL_COUNT // THREAD_COUNT)
        while not over.is_set():
            room.acquire()
            ask.future(request, metadata=metadata).add_done_callback(lambda _: room.release())


def connections(target: str, number: int, over: threading.Event) -> None:
    while not over.is_set():
        with (
            contextlib.suppress(shardwell.ShardwellError),
            shardwell.connect(target, worker_id=f"flood-{number}"),
        ):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", required=True)
    parser.add_argument("--kind", choices=["payload", "calls", "connections"], required=True)
    args = parser.parse_args()
    flood, over = globals()[args.kind], threading.Event()
    threads = [
        threading.Thread(target=flood, args=(args.shards, number, over), daemon=True)
        for number in range(THREAD_COUNT)
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()  # or until its parent is gone
    over.set()


if __name__ == "__main__":
    main()
