"""Goal: a training is one state: a program that is killed anywhere goes on as if nothing had been.

Method: a whole program with two optimizers, a schedule of each kind, a GradScaler, a moving average
of the weights, batch normalization, dropout, a table and random numbers of its own kills itself at
places of its loop, and is started again. All that it prints at the end, bit by bit, is that of a
run that nothing disturbed; so is that of one that goes on from its checkpoint on other shards.
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from harness.programs.reported import ended, started

MISSING = importlib.util.find_spec("torch") is None
pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(MISSING, reason="make test-extras installs torch"),
]
PROGRAM = """
import hashlib, random
import numpy as np
SAVED, EVERY, RESUME = sys.argv[2], int(sys.argv[3]), sys.argv[4] == "resume"
WIDTH = int(sys.argv[6])
places = dict(place.split(":") for place in sys.argv[5].split(",") if place)

def maybe_end(place):
    if places.get(str(step)) == place:
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(11)  # each process begins with it, and goes on with what is kept
noise, dice = np.random.default_rng(5), random.Random(5)
client = shardwell.connect(worker_id="net-0")
if RESUME and not [each for shard in client.status() for each in shard.parameters]:
    client.restore_checkpoint(SAVED + "/{step}")
rows = shardwell.torch.Embedding(
    client.table(
        "rows", row_count=COUNT, dim=3, optimizer=shardwell.SGD(0.1), worker_count=1, codec="fp32"
    )
)
body = torch.nn.Sequential(
    torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)
)
critic = torch.nn.Linear(1, 1)
average = torch.optim.swa_utils.AveragedModel(
    body, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75), use_buffers=True
)
wide = torch.nn.Linear(WIDTH, 1)
wide_average = torch.optim.swa_utils.AveragedModel(wide)
plain = torch.optim.Adam(body.parameters(), lr=0.05)
warm = torch.optim.lr_scheduler.LinearLR(plain, 0.2, total_iters=4)
falling = torch.optim.lr_scheduler.MultiStepLR(plain, [6, 12], 0.5)
schedule = torch.optim.lr_scheduler.SequentialLR(plain, [warm, falling], [4])
rare = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)
watching = torch.optim.lr_scheduler.ReduceLROnPlateau(rare, factor=0.5, patience=1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
facts = {"losses": [], "seen": 0}
training = shardwell.torch.prepare(
    body, plain,
    torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
    client=client, name="net", codec="fp32",
    schedule=schedule,
    state={
        "average": average, "wide": wide_average, "facts": facts, "noise": noise, "dice": dice,
        "rng": torch.default_generator, "scaler": scaler,
    },
)
body, optimizer, loader = training
critic, second, _ = shardwell.torch.prepare(
    critic, rare, client=client, name="critic", codec="fp32", schedule=watching,
)
body.train()
for epoch in loader.epochs(4):
    for indices, in loader:
        step = optimizer.next_step
        maybe_end("drawn")
        found = body(rows(indices) + noise.random() + dice.random())
        judged = critic(found.detach()).square().mean()
        loss = found.square().mean() + 0.1 * facts["seen"]
        loss.backward()
        scaler.scale(judged).backward()
        maybe_end("backward")
        optimizer.step()
        maybe_end("first")
        scaler.step(second)
        maybe_end("both")
        scaler.update()
        schedule.step()
        maybe_end("half")
        watching.step(float(judged))
        optimizer.zero_grad()
        second.zero_grad()
        average.update_parameters(body)
        torch.nn.init.constant_(wide.weight, float(loss))
        wide_average.update_parameters(wide)
        facts["losses"] = [*facts["losses"][-3:], float(loss)]
        facts["seen"] += len(indices)
        if EVERY and optimizer.next_step % EVERY == 0:
            training.save(SAVED + "/{step}")
        maybe_end("tail")

def digest(tensors):
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().numpy().tobytes())
    return found.hexdigest()[:16]

print("BODY", digest(body.state_dict().values()), flush=True)
print("CRITIC", digest(critic.state_dict().values()))
print("AVERAGE", *[digest(each.state_dict().values()) for each in (average, wide_average)])
print("ROWS", digest([torch.from_numpy(client.table("rows").get_rows(np.arange(COUNT)))]))
print("RATES", *[group["lr"] for each in (optimizer, second) for group in each.param_groups])
print("SCALE", scaler.get_scale(), schedule.last_epoch, watching.num_bad_epochs)
print("DRAWN", noise.random(), dice.random(), torch.rand(()).item(), *facts["losses"], flush=True)
"""
PLACES = ("drawn", "backward", "first", "both", "half", "tail")
STEPS = 28
SMALL, LARGE = 4, 600_000
"""Widths of a layer with a moving average; that of the large one is kept in pages."""


def end(target: str, *arguments: Any, width: int = SMALL) -> tuple[int, list[str]]:
    with started(target, PROGRAM, *map(str, (*arguments, width))) as program:
        ended(program)
        return program.process.returncode, program.lines


@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "kill_count", [6, pytest.param(20, marks=pytest.mark.exhaustive)], ids=["6", "20"]
)
def test_a_program_that_is_killed_anywhere_has_the_same_bits(
    cluster, tmp_path, kill_count: int, width: int
) -> None:
    chance = random.Random(f"{kill_count} {width}")
    steps = sorted({1, *chance.sample(range(STEPS), kill_count)})
    kills = [(step, chance.choice(PLACES)) for step in steps]
    code, undisturbed = end(cluster(2).target, tmp_path, 0, "begin", "", width=width)
    assert code == 0
    assert len(undisturbed) == 7, undisturbed
    target = cluster(2).target
    for step, place in kills:
        code, lines = end(target, tmp_path, 0, "begin", f"{step}:{place}", width=width)
        assert code == -9, (step, place, lines)
    code, lines = end(target, tmp_path, 0, "begin", "", width=width)
    assert lines == undisturbed, kills


@pytest.mark.parametrize("width", [SMALL, LARGE], ids=["small", "large"])
def test_a_checkpoint_of_the_whole_training_goes_on_on_other_shards(
    cluster, tmp_path, width: int
) -> None:
    _, undisturbed = end(cluster(2).target, tmp_path, 5, "begin", "", width=width)
    for path in tmp_path.iterdir():
        if path.name != "10":
            path.rename(path.with_name(f"later-{path.name}"))
    code, lines = end(cluster(3).target, tmp_path, 0, "resume", "", width=width)
    assert (code, lines) == (0, undisturbed)


LONE = """
schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
loader = torch.utils.data.DataLoader(data, batch_size=1, shuffle=True)
model, optimizer, loader = shardwell.torch.prepare(
    model, plain, loader, schedule=schedule, name="net", codec="fp32", members=shardwell.Elastic(),
)
for epoch in loader.epochs(2):
    for indices, in loader:
        step = optimizer.next_step
        print("RATE", step, schedule.get_last_lr()[0], flush=True)
        model(indices).backward()
        if step == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
"""


def test_a_member_that_gets_sigterm_takes_its_whole_step_along(cluster) -> None:
    """The next one, under another name, goes on with the schedule of its step."""
    target = cluster(2).target
    seen = []
    for stop in (3, 9, -1):
        variables = {"SHARDWELL_WORKER_ID": f"w{stop}"}
        with started(target, LONE, stop=stop, environment=variables) as program:
            assert program.end() == (143 if stop > 0 else 0), program.log
        seen += [line.split()[1:] for line in program.lines if line.startswith("RATE")]
    assert [int(step) for step, _ in seen] == list(range(52))
    assert [float(rate) for _, rate in seen] == [1 / (1 + step) for step in range(52)]
