"""Goal: a shard of a table that was killed goes on from its files, or says that it has none."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
import pytest

import shardwell
from harness.data.table_training import EVERY, OPTIONS, KnownRows, batch
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import ServingShard
from harness.threads import in_background


def test_a_shard_that_lost_its_memory_is_noticed(connect) -> None:
    """It kept nothing: rows that are gone are never taken for rows that are new."""
    with ServingShard() as shard:
        address = shard.address()
        client = connect(address, "w0", timeout_s=PATIENCE_S)
        table = client.table("rows", **OPTIONS)
        for step in range(2):
            table.put_row_gradients(*batch(step))
        port = int(address.rpartition(":")[2])
    with ServingShard(port=port):
        with pytest.raises(shardwell.UnknownTableError, match="rows") as caught:
            table.get_rows(EVERY)
        assert caught.value.table == "rows"
        with pytest.raises(shardwell.UnknownTableError):
            table.put_row_gradients(*batch(2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "verb"), [("sync", "exchange"), ("async", "put")])
def test_a_table_of_a_killed_shard_comes_back_from_its_files(connect, tmp_path, mode, verb) -> None:
    """Two workers train on; one of two shards is killed twice, and started again on its port."""
    step_count = 14
    tables: list[shardwell.Table] = []

    def train(index: int) -> None:
        for step in range(step_count):
            if verb == "exchange":
                tables[index].exchange_rows(*batch(step, index))
            else:
                tables[index].put_row_gradients(*batch(step, index))

    with contextlib.ExitStack() as stack:

        def serve(index: int, port: int = 0) -> ServingShard:
            flags = (f"--data-dir={tmp_path}/{index}",)
            return stack.enter_context(ServingShard(*flags, index=index, count=2, port=port))

        shards = [serve(0), serve(1)]
        addresses = [shard.address() for shard in shards]
        for index in (0, 1):
            client = connect(",".join(addresses), f"w{index}", timeout_s=PATIENCE_S)
            options = {**OPTIONS, "worker_count": 2, "mode": mode}
            tables.append(client.table("rows", **options))
        training = [in_background(partial(train, index)) for index in (0, 1)]
        for kill_count in (1, 2):
            eventually("it trains", lambda n=kill_count: tables[0].next_step >= 4 * n)
            shards[1].close()
            shards[1] = serve(1, int(addresses[1].rpartition(":")[2]))
            assert shards[1].address() == addresses[1]
        for each in training:
            each.result(PATIENCE_S)
        model = KnownRows(step_count, 2, mode=mode)
        model.check(tables[0].get_rows(EVERY, min_version=step_count))
        np.testing.assert_array_equal(tables[1].row_ids(), sorted(model.model.rows))
