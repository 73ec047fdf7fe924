"""Goal: each sample of a prepared loader counts once an epoch, whatever becomes of the workers and
however a program, or a framework, goes through the loader.

Method: weights count visits: sample i's gradient is 1 at place i, with a rate of 1. Workers are
processes that are killed, or threads. Frameworks run as they come.
"""

from __future__ import annotations

import collections
import importlib.util
import itertools
import json
import signal
from functools import partial
from typing import Any

import pytest

import shardwell
from harness.programs.commands import Program
from harness.threads import together

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler  # noqa: E402

from harness.data.visits import BATCH_SIZE, LENGTH, Visits, counts_at  # noqa: E402
from harness.programs.loader_worker import PATH  # noqa: E402

pytestmark = pytest.mark.extras
ALL = list(range(LENGTH))
BATCHES = -(-LENGTH // BATCH_SIZE)
ELASTIC = shardwell.Elastic(member_return_s=0.2, member_lease_s=1.0, reference_count=1)


def pair(cluster: Any, connect: Any, **options: Any) -> list[Visits]:
    """Two workers of a fixed crew."""
    running = cluster(2)
    clients = [connect(running, f"w{n}") for n in range(2)]
    make = partial(Visits, factor=2, worker_count=2, **options)
    return together([partial(make, client) for client in clients])


def flat(batches: Any) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize(
    "crew",
    [
        {"worker_count": 2},
        {
            "members": {
                "min_count": 2,
                "member_return_s": 0.2,
                "member_lease_s": 1.0,
                "reference_count": 1,
            }
        },
    ],
    ids=["fixed", "elastic"],
)
def test_a_worker_is_killed_in_the_middle_of_an_epoch_and_started_again(
    cluster, connect, crew
) -> None:
    """Of one shard, as a member may leave a gradient in some chunks when there are several."""
    running = cluster(1 if "members" in crew else 2)

    def started(worker_id: str) -> Program:
        options = json.dumps({"epochs": 6, **crew})
        environment = {"SHARDWELL_SHARDS": running.target, "OMP_NUM_THREADS": "1"}
        program = (str(PATH), "plain", worker_id, options)
        return Program(*program, environment=environment, is_forked=True)

    with started("w0") as first, started("w1") as second:
        for _ in range(9):
            assert second.read_line().startswith("SEEN")
        second.send(signal.SIGKILL)
        assert second.end() == -9
        with started("w1") as again:
            for each in (first, again):
                assert each.end() == 0, each.log[-20:]
    assert counts_at(connect(running, "reader")) == [6] * LENGTH


def test_elastic_workers_end_with_one_model(cluster, connect) -> None:
    """Of an odd number of batches one has the last, whose weights the other gets, too."""
    running = cluster(2)
    clients = [connect(running, f"w{n}") for n in range(2)]
    workers = together([partial(Visits, client, members=ELASTIC) for client in clients])

    def train(worker: Visits) -> None:
        for _ in worker.loader.epochs(1):
            worker.epoch()

    together([partial(train, worker) for worker in workers])
    assert [worker.counts for worker in workers] == [[1] * LENGTH] * 2


FRAMEWORKS = ["accelerate", "epochs", "lightning", "trainer"]


@pytest.mark.parametrize("how", FRAMEWORKS)
def test_a_framework_is_killed_in_the_second_of_three_epochs(
    cluster, connect, tmp_path, monkeypatch, how
) -> None:
    module = {"trainer": "transformers", "epochs": "accelerate"}.get(how, how)
    if importlib.util.find_spec(module) is None:
        pytest.skip("make test-extras installs it")
    monkeypatch.chdir(tmp_path)
    running = cluster(1)
    dies_at = {"accelerate": 13, "epochs": 13}.get(how, 7)

    def started(**options: Any) -> Program:
        given = json.dumps({"epochs": 3, "batch_size": 5, "named": how == "trainer", **options})
        environment = {"SHARDWELL_SHARDS": running.target, "OMP_NUM_THREADS": "1"}
        return Program(str(PATH), how, "w0", given, environment=environment, is_forked=True)

    with started(dies_at=dies_at) as first:
        assert first.end() == -9, first.log[-20:]
    with started() as second:
        assert second.end() == 0, second.log[-20:]
    assert counts_at(connect(running, "reader")) == [3] * LENGTH


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_dealt_among_the_workers(cluster, connect, shuffle) -> None:
    workers = pair(cluster, connect, kept={"shuffle": shuffle})
    orders = []
    for epoch in range(1, 4):
        first, second = together([worker.epoch for worker in workers])
        assert flat([*first, *second]) == ALL
        assert len(first) == len(second) == len(workers[0].loader) == 7
        assert workers[0].counts == [epoch] * LENGTH
        orders.append(first)
    assert (orders[0] != orders[1]) == shuffle


def test_accumulation_that_does_not_divide_the_epoch(cluster, connect) -> None:
    """A batch whose gradient was in no step when its worker ended is dealt again."""
    running = cluster(2)
    for end in (7, None):
        run = Visits(connect(running, "w0"))
        count = itertools.count(1)
        for _ in run.loader.epochs(3):
            for (batch,) in run.loader:
                run.loss(batch).backward()
                if next(count) % 3 == 0:
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                if end == run.optimizer.next_step:
                    break
            if end == run.optimizer.next_step:
                break
        else:
            run.optimizer.step()
    assert run.counts == [3] * LENGTH


def test_drop_last_leaves_out_what_is_less_than_a_batch_for_each(cluster, connect) -> None:
    workers = pair(cluster, connect, kept={"drop_last": True})
    whole = LENGTH // (2 * BATCH_SIZE) * 2 * BATCH_SIZE
    for epoch in range(1, 3):
        first, second = together([worker.epoch for worker in workers])
        seen = flat([*first, *second])
        assert len(seen) == len(set(seen)) == whole
        assert len(workers[0].loader) == len(first) == 6
        assert sum(workers[0].counts) == epoch * whole


def test_a_loader_with_processes_that_prefetch(cluster, connect) -> None:
    """They are the first worker's in its second epoch, when it breaks off and is started again."""
    running = cluster(2)
    kept = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
    first = Visits(connect(running, "w0"), kept=kept)
    assert flat(first.epoch()) == ALL
    for number, (batch,) in enumerate(first.loader):
        if number == 3:
            break
        first.step(batch)
    assert len(flat(first.epoch())) == LENGTH - 3 * BATCH_SIZE  # it goes on
    assert first.counts == [2] * LENGTH
    for (batch,) in itertools.islice(first.loader, 2):
        first.step(batch)
    again = Visits(connect(running, "w0"), kept=kept)
    assert len(flat(again.epoch())) == LENGTH - 2 * BATCH_SIZE
    assert again.counts == [3] * LENGTH


def test_all_workers_start_again_with_another_batch_size(cluster, connect) -> None:
    running = cluster(2)

    def work(number: int, batch_size: int, most: int | None) -> Visits:
        client = connect(running, f"w{number}")
        run = Visits(client, factor=2, worker_count=2, batch_size=batch_size)
        for _ in run.loader.epochs(2):
            for (batch,) in itertools.islice(run.loader, most):
                run.step(batch)
        client.close()
        return run

    together([partial(work, number, 4, 2) for number in range(2)])
    found = together([partial(work, number, 3, None) for number in range(2)])
    assert found[0].counts == [2] * LENGTH


def test_a_look_at_the_first_batch_takes_nothing(cluster, connect) -> None:
    workers = pair(cluster, connect)
    first = next(iter(workers[0].loader))[0].tolist()
    held = iter(workers[0].loader)
    assert next(held)[0].tolist() == first  # and it is held while the epoch is trained
    found = together([worker.epoch for worker in workers])
    assert found[0][0] == first
    assert flat(itertools.chain(*found)) == ALL
    assert workers[0].counts == [1] * LENGTH


def test_a_loop_that_breaks_goes_on_in_the_epoch(cluster, connect) -> None:
    run = Visits(connect(cluster(1), "w0"))
    seen: list[int] = []
    for _ in range(2):  # 5 batches, 5 and 3; and the fourth pass is of the next epoch
        for _ in range(3):
            for (batch,) in itertools.islice(run.loader, 5):
                seen += batch.tolist()
                run.step(batch)
        assert sorted(seen) == ALL
        seen = []
    assert run.counts == [2] * LENGTH


def test_an_evaluation_over_the_loader_counts_nothing(cluster, connect) -> None:
    run = Visits(connect(cluster(1), "w0"))

    def evaluated() -> int:
        return sum(len(batch) for (batch,) in run.loader)

    assert evaluated() == LENGTH
    for number, (batch,) in enumerate(run.loader):
        if number % 5 == 0:  # between this batch and its gradient
            assert 0 < evaluated() <= LENGTH
        run.step(batch)
    assert run.counts == [1] * LENGTH
    assert evaluated() == LENGTH
    run.epoch()
    assert run.counts == [2] * LENGTH


@pytest.mark.parametrize("crew", [{}, {"members": ELASTIC}], ids=["alone", "elastic"])
def test_a_step_that_a_scaler_skips_has_its_samples_dealt_again(cluster, connect, crew) -> None:
    run = Visits(connect(cluster(2), "w0"), **crew)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = collections.Counter[int]()
    for _ in run.loader.epochs(2):
        for (batch,) in run.loader:
            overflows = 7 in batch.tolist() and not seen[7]
            seen.update(batch.tolist())
            scaler.scale(run.loss(batch) * (float("inf") if overflows else 1.0)).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
    assert seen[7] == 3
    assert run.counts == [2] * LENGTH


def test_gradients_that_are_dropped_have_their_samples_dealt_again(cluster, connect) -> None:
    run = Visits(connect(cluster(1), "w0"))
    for number, (batch,) in enumerate(run.loader):
        run.loss(batch).backward()
        if number in (2, 3):
            run.optimizer.zero_grad()
        elif number == 5:
            run.optimizer.skip_step()
            run.optimizer.zero_grad()
        else:
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert number == BATCHES + 2
    assert run.counts == [1] * LENGTH


def test_several_backward_passes_of_a_batch_are_one(cluster, connect) -> None:
    running = cluster(1)
    run = Visits(connect(running, "w0"))
    for (batch,) in itertools.islice(run.loader, 5):
        with run.optimizer.no_sync():
            (run.loss(batch) / 2).backward()
        (run.loss(batch) / 2).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    again = Visits(connect(running, "w0"))
    again.epoch()
    assert again.counts == [1] * LENGTH


def test_an_optimizer_that_stays_on_the_workers(cluster, connect) -> None:
    def maximized(tensors: Any) -> Any:
        return torch.optim.SGD(tensors, 1.0, maximize=True)

    workers = pair(cluster, connect, optimizer=maximized)
    for epoch in range(1, 3):
        found = together([worker.epoch for worker in workers])
        assert flat(itertools.chain(*found)) == ALL
        assert [-count for count in workers[0].counts] == [epoch] * LENGTH


def test_epochs_that_are_over_have_no_batches(cluster, connect) -> None:
    running = cluster(2)
    first = Visits(connect(running, "w0"))
    expected = [first.epoch() for _ in range(2)]
    assert flat(expected[0]) == flat(expected[1]) == ALL
    again = Visits(connect(running, "w0"))
    assert list(again.loader.epochs(2)) == []
    passes = [again.epoch() for _ in range(4)]
    assert [len(flat(each)) for each in passes] == [0, 0, LENGTH, LENGTH]
    assert again.counts == [4] * LENGTH
    again.loader.set_epoch(5)
    assert len(flat(again.epoch())) == 2 * LENGTH  # what is left of those before, too


def test_an_asynchronous_worker_has_an_order_of_its_own(cluster, connect) -> None:
    running = cluster(1)
    first = Visits(connect(running, "w0"), mode="async")
    other = Visits(connect(running, "w1"), mode="async")
    its, theirs = ([batch.tolist() for (batch,) in each.loader] for each in (first, other))
    assert flat(its) == flat(theirs) == ALL
    assert its != theirs
    assert first.epoch() == its  # which was looked at alone
    second = first.epoch()
    assert flat(second) == ALL
    assert second != its


TAKEN: dict[str, Any] = {
    "a DistributedSampler": lambda data: {
        "batch_size": 4,
        "sampler": DistributedSampler(data, 2, 1, seed=3),
    },
    "a batch sampler": lambda data: {
        "batch_sampler": BatchSampler(RandomSampler(data), 4, drop_last=False)
    },
}


@pytest.mark.parametrize("kind", TAKEN)
def test_samplers_that_have_each_sample_once_are_taken(cluster, connect, kind) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(LENGTH))
    model = torch.nn.Linear(1, 1)
    loader = shardwell.torch.prepare(
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        DataLoader(data, **TAKEN[kind](data)),
        client=connect(cluster(1), "w0"),
    )[2]
    batches = [batch.tolist() for (batch,) in loader]
    assert flat(batches) == ALL
    assert len(batches) == len(loader) == BATCHES
    assert batches[0] != ALL[:4]


def test_a_framework_that_deals_batches_again_is_named(cluster, connect) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    run = Visits(connect(cluster(1), "w0"))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(shardwell.ArgumentError, match=r"2 ranks.*leave the loader out"):
            list(DataLoader(run.loader.dataset, batch_sampler=run.loader.batch_sampler))
        assert len(flat(run.epoch())) == LENGTH
    finally:
        torch.distributed.destroy_process_group()
