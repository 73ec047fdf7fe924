"""Goal: workers of a DataLoader are forked beside a connected client, whichever module imported
gRPC first.

Method: programs of their own, since gRPC reads its variables when it is imported.
"""

from __future__ import annotations

import pytest

from harness.programs.commands import Program

pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")

TRAIN = """
import faulthandler, sys
faulthandler.dump_traceback_later(100, exit=True)
FIRST
import numpy as np, shardwell, torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.full((3,), float(index))

with shardwell.connect(sys.argv[1], worker_id="w0", same_host=sys.argv[2] == "near") as client:
    net = client.parameter("net", size=1000, optimizer=shardwell.SGD(learning_rate=0.1))
    net.init(np.zeros(1000, np.float32))
    for epoch in range(5):
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60
        )
        total = 0.0
        for batch in loader:
            total += batch[:, 0].sum().item()
            net.exchange(np.ones(1000, np.float32))
        assert total == 120, total
    print(client.parameter("net").next_step)
"""
WARNING = "grpc was imported before shardwell"
CURES = ("import shardwell first", "GRPC_ENABLE_FORK_SUPPORT=0")


UNSET = "import os; os.environ.pop('GRPC_ENABLE_FORK_SUPPORT', None); "
"""The test's own process has it from its import of Shardwell."""


@pytest.mark.parametrize("transport", ["near", "far"])
@pytest.mark.parametrize(
    ("first", "is_warned"),
    [
        (UNSET + "import grpc; grpc.insecure_channel('127.0.0.1:1').close()", True),
        (UNSET + "os.environ['GRPC_ENABLE_FORK_SUPPORT'] = '0'; import grpc", False),
        (UNSET + "import torch", False),
    ],
)
def test_loaders_beside_a_client(cluster, first, is_warned, transport) -> None:
    program = TRAIN.replace("FIRST", first)
    with Program("-c", program, cluster(1).target, transport) as running:
        assert running.end(120.0) == 0, running.log
    assert running.lines == ["20"]
    warnings = [line for line in running.log if WARNING in line]
    assert len(warnings) == is_warned, running.log
    assert all(cure in line for line in warnings for cure in CURES)
