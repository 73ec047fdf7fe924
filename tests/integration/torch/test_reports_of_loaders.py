"""Goal: public reports on loaders, as programs: each sample counts once an epoch, in an order
of its own, whatever wraps the loader, looks into it, breaks out of it or prefetches from it.

Method: a docstring cites the report and says what its author wanted. Programs as users write them
train on real shards; they print what they see (harness/programs/reported.py), some kill themselves,
and their model's weights are the number of times that each sample counted. Skipped where the
frameworks are not installed (`make test-extras` installs them).
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from harness.programs.reported import (
    COUNT,
    PREPARED,
    batches,
    each_sample,
    ended,
    run,
    run_all,
    started,
    times,
)

MISSING = [
    name
    for name in ("accelerate", "lightning", "torch", "transformers")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(bool(MISSING), reason="make test-extras installs them"),
]
LOOP = """
for epoch in loader.epochs(2):
    for indices, in loader:
        note(optimizer, indices)
        model(indices).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LIGHTNING = """
import logging, lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        note(optimizer, batch[0])
        return self.model(batch[0])

    def configure_optimizers(self):
        return optimizer

def fit(loader, **options):
    lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options
    ).fit(Module(), loader)
"""
EPOCH_STEPS = -(-COUNT // 4)


def visits(connect, running) -> list[float]:
    """How often the shards counted each sample."""
    weights = connect(running, "reader").parameter("net").get_weights()
    return np.asarray(weights["visits"]).tolist()


ACCELERATE = (
    PREPARED
    + """
import accelerate
loader = accelerate.Accelerator(cpu=True).prepare(loader)
while optimizer.next_step < 14:
    for indices, in loader:
        note(optimizer, indices)
        model(indices).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.next_step == 14:
            break
"""
)
FITTED = (
    PREPARED
    + LIGHTNING
    + """
fit(loader, max_epochs=10, callbacks=[shardwell.torch.LightningCallback(max_steps=14)])
"""
)


@pytest.mark.parametrize("text", [ACCELERATE, FITTED], ids=["accelerate", "lightning"])
def test_a_loader_that_a_framework_prepares_again_keeps_its_place(cluster, connect, text) -> None:
    """huggingface/accelerate#2627, ray-project/ray#22108: a loader that is prepared twice is to
    have another order in each epoch, and after a restart the rest of its epoch."""
    whole = run(cluster(2).target, text)
    assert times(whole[:EPOCH_STEPS]) == times(whole[EPOCH_STEPS:]) == each_sample(1)
    assert batches(whole[:EPOCH_STEPS]) != batches(whole[EPOCH_STEPS:])
    running = cluster(2)
    assert run(running.target, text, stop=11) + run(running.target, text) == whole
    assert visits(connect, running) == [2.0] * COUNT


def test_epochs_have_orders_of_their_own_without_set_epoch(cluster) -> None:
    """pytorch/pytorch#31771: each epoch has another order, though no program calls set_epoch."""
    text = PREPARED + LOOP.replace("epochs(2)", "epochs(3)")
    by_rank = run_all(cluster(2).target, text, 2)
    length = len(by_rank[0]) // 3
    epochs = [[seen[n * length : (n + 1) * length] for seen in by_rank] for n in range(3)]
    for epoch in epochs:
        assert times(*epoch) == each_sample(1)
    orders = [tuple(map(tuple, map(batches, epoch))) for epoch in epochs]
    assert len(set(orders)) == 3


def test_a_program_that_starts_again_between_epochs_begins_the_next_one(cluster, connect) -> None:
    """Lightning-AI/pytorch-lightning#21938: with loader processes, the first epoch after a restart
    is to have its own order, and not that of the first epoch again."""
    text = (
        PREPARED.replace("shuffle=True", "shuffle=True, num_workers=1")
        + LIGHTNING
        + "fit(loader, max_epochs=9, callbacks=[shardwell.torch.LightningCallback(max_steps=14)])"
    )
    whole = run(cluster(2).target, text)
    running = cluster(2)
    assert run(running.target, text, stop=EPOCH_STEPS) == whole[:EPOCH_STEPS]
    assert run(running.target, text) == whole[EPOCH_STEPS:]
    assert batches(whole[:EPOCH_STEPS]) != batches(whole[EPOCH_STEPS:])
    assert visits(connect, running) == [2.0] * COUNT


@pytest.mark.parametrize("count", [25, 27, 32, 3])
def test_ranks_share_any_number_of_samples_without_repeats(cluster, count) -> None:
    """pytorch/pytorch#49180: where samples can't be divided evenly, none is seen twice to fill up,
    none is left out, and no rank waits for another at the end."""
    by_rank = run_all(cluster(2).target, PREPARED + LOOP, 2, {"COUNT": str(count)})
    assert times(*by_rank) == each_sample(2, range(count))
    assert len(by_rank[0]) == len(by_rank[1])


def test_accumulation_that_does_not_divide_an_epoch_loses_none_of_it(cluster, connect) -> None:
    """Lightning-AI/pytorch-lightning#19987: batches at an epoch's end that are no whole step count
    like all others. What Lightning drops at the end of an epoch that a kill has cut is dealt again.
    """
    text = (
        PREPARED.replace('name="net"', 'name="net", gradient_accumulation_steps=4')
        + LIGHTNING
        + """
callback = shardwell.torch.LightningCallback(max_steps=6)
fit(loader, max_epochs=9, accumulate_grad_batches=4, callbacks=[callback])
"""
    )
    undisturbed, running = cluster(2), cluster(2)
    steps = [step for step, _ in run(undisturbed.target, text)]
    assert steps == [step for step in range(6) for _ in range(3 if step % 2 else 4)]
    assert visits(connect, undisturbed) == [3 / 4] * COUNT  # Lightning divides each loss by 4
    run(running.target, text, stop=3)
    run(running.target, text)
    assert visits(connect, running) == [3 / 4] * COUNT


def test_a_loop_that_breaks_early_goes_on_with_the_rest_of_the_epoch(cluster, connect) -> None:
    """Lightning-AI/litData#649: after a break, the next `for` over the loader has the samples that
    are left, and not those at the epoch's beginning again."""
    text = (
        PREPARED
        + """
while optimizer.next_step < 14:
    for indices, in loader:
        note(optimizer, indices)
        model(indices).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.next_step % 3 == 0 or optimizer.next_step == 14:
            break
"""
    )
    running = cluster(2)
    seen = run(running.target, text)
    assert times(seen[:EPOCH_STEPS]) == times(seen[EPOCH_STEPS:]) == each_sample(1)
    assert visits(connect, running) == [2.0] * COUNT


def test_a_look_at_one_batch_moves_no_rank_into_another_epoch(cluster) -> None:
    """pytorch/pytorch#1917: a single batch is to be had without a loop over the loader: before the
    training, between its epochs and behind it, on one rank alone."""
    text = (
        PREPARED
        + """
def look():
    if optimizer.client.rank == 0:
        indices, = next(iter(loader))
        print("LOOK", len(indices), flush=True)

look()
for epoch in range(2):
    for indices, in loader:
        note(optimizer, indices)
        model(indices).backward()
        optimizer.step()
        optimizer.zero_grad()
    look()
"""
    )
    target = cluster(2).target
    with (
        started(target, text, rank=0, worker_count=2) as first,
        started(target, text, rank=1, worker_count=2) as second,
    ):
        by_rank = [ended(first), ended(second)]
    length = len(by_rank[0]) // 2
    for part in (slice(length), slice(length, None)):
        assert times(*(seen[part] for seen in by_rank)) == each_sample(1)
    assert len([line for line in first.lines if line.startswith("LOOK")]) == 3
    assert not [line for line in second.lines if line.startswith("LOOK")]


def test_what_a_loader_had_prefetched_comes_again_after_a_kill(cluster, connect) -> None:
    """meta-pytorch/data#1520: batches that the loader's processes had fetched, and the program had
    not seen, are not lost when the program is killed."""
    options = "shuffle=True, num_workers=2, prefetch_factor=3, persistent_workers=True"
    text = PREPARED.replace("shuffle=True", options) + LOOP
    running = cluster(2)
    first = run(running.target, text, stop=3)
    assert times(first, run(running.target, text)) == each_sample(2)
    assert visits(connect, running) == [2.0] * COUNT


def test_an_evaluation_by_one_rank_within_an_epoch_disturbs_no_loader(cluster) -> None:
    """rwth-i6/returnn#1454: one rank evaluates in the middle of an epoch, on other data and on
    those of the training; the others need not, none hangs, and the epoch goes on where it was."""
    text = (
        PREPARED
        + """
others = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1)
for epoch in loader.epochs(2):
    for indices, in loader:
        note(optimizer, indices)
        model(indices).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.client.rank == 0 and optimizer.next_step % 3 == 2:
            model.eval()
            with torch.no_grad():
                for each in (others, loader.whole):
                    loss = sum(float(model(indices)) for indices, in each)
                    print("LOSS", round(loss), flush=True)
            model.train()
"""
    )
    by_rank = run_all(cluster(2).target, text, 2)
    length = len(by_rank[0]) // 2
    for part in (slice(length), slice(length, None)):
        assert times(*(seen[part] for seen in by_rank)) == each_sample(1)


def test_epochs_after_a_restart_in_the_middle_of_one_are_whole(cluster, connect) -> None:
    """huggingface/datasets#7447, huggingface/accelerate#1451: what a restarted program leaves out
    of its first epoch, it leaves out of no other one."""
    options = "shuffle=True, num_workers=1, persistent_workers=True"
    text = PREPARED.replace("shuffle=True", options) + LOOP.replace("epochs(2)", "epochs(3)")
    running = cluster(2)
    first, second = run(running.target, text, stop=5), run(running.target, text)
    seen = first + second
    assert len(seen) == 3 * EPOCH_STEPS
    for begin in range(0, len(seen), EPOCH_STEPS):
        assert times(seen[begin : begin + EPOCH_STEPS]) == each_sample(1)
    assert visits(connect, running) == [3.0] * COUNT
