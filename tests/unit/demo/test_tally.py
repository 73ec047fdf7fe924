"""The rows of what has counted, and of what has not."""

from __future__ import annotations

from shardwell.rpc.shard_status import PartialSamples
from shardwell_server.demo.digits.tally import account_rows


def split(worker_id: str, step: int, start: int, stop: int) -> PartialSamples:
    return PartialSamples(worker_id=worker_id, step=step, ranges=((start, stop),))


def test_whole_epochs_are_counted_and_others_listed() -> None:
    counted = (0, 2300), (2400, 2500), (3000, 3001)
    rows = dict(account_rows(counted, (), 1000, (), 0))
    assert rows == {
        "digits": "2,401 counted, [green]none twice[/]; all 1,000 in 2 of 4 epochs",
        "unfinished": "400 in epoch 2; 1 in epoch 3",
        "in part": "none",
    }


def test_digits_in_part_are_done_and_named() -> None:
    partial = (split("w2", 7, 990, 1000), split("w0", 9, 1500, 1520))
    rows = dict(account_rows(((0, 990), (1000, 2000)), (), 1000, partial, 2))
    assert rows == {
        "digits": "1,990 counted, [green]none twice[/]; all 1,000 in 2 of 2 epochs",
        "in part": "10 of w2 in step 7, epoch 0; 20 of w0 in step 9, epoch 1",
    }


def test_long_lists_end_with_a_count() -> None:
    partial = tuple(split("w0", step, step, step + 1) for step in range(3))
    rows = dict(account_rows((), (), 1000, partial, 7))
    assert rows["in part"].endswith("1 of w0 in step 2, epoch 0; and 4 more")
    assert dict(account_rows((), (), 1000, (), 0))["digits"].endswith("all 1,000 in 0 of 0 epochs")


def test_a_digit_that_counted_twice_is_shown() -> None:
    rows = dict(account_rows(((0, 5),), ((1, 3),), 1000, (), 0))
    assert "[bold red]2 twice[/]" in rows["digits"]
