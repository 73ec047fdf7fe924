"""Programs of users' reports: workers that say which samples they see, and may kill themselves.

A program begins with `HEAD`, in which `note` prints a batch before its gradient is made; one that
is to be killed dies there, so nothing of its last batch has left. A model of visits says how often
a gradient of each sample counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from harness.programs.commands import Program

COUNT = 26
"""Samples of the dataset: no multiple of a batch, which has 4."""
HEAD = f"""
import os, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch, shardwell, shardwell.torch
STOP, COUNT = int(sys.argv[1]), int(os.environ.get("COUNT", {COUNT}))
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # they outlive a kill so long

class Visits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.visits = torch.nn.Parameter(torch.zeros(COUNT))

    def forward(self, indices):
        return -self.visits[indices].sum()

def note(optimizer, indices):
    print("SEEN", optimizer.next_step, *indices.tolist(), flush=True)
    if optimizer.next_step == STOP:
        os.kill(os.getpid(), signal.SIGKILL)

data = torch.utils.data.TensorDataset(torch.arange(COUNT))
model = Visits()
plain = torch.optim.SGD(model.parameters(), lr=1.0)
"""
PREPARED = """
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = shardwell.torch.prepare(model, plain, loader, name="net", codec="fp32")
"""
Seen = list[tuple[int, tuple[int, ...]]]
"""Steps, and the samples of a batch of each."""


def started(
    target: str,
    text: str,
    *arguments: str,
    stop: int = -1,
    rank: int = 0,
    worker_count: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Program:
    """A worker, as a launcher starts it, whose program kills itself in the step `stop`."""
    launcher = {"RANK": str(rank), "WORLD_SIZE": str(worker_count)} if worker_count > 1 else {}
    variables = {
        "SHARDWELL_SHARDS": target,
        "OMP_NUM_THREADS": "1",
        **launcher,
        **(environment or {}),
    }
    return Program("-c", HEAD + text, str(stop), *arguments, environment=variables, is_forked=True)


def ended(program: Program, *, whole: bool = False) -> Seen:
    """What a program saw and gave a gradient of; it has ended well, or killed itself.

    With `whole` that is all that it says, also of its last step.
    """
    code = program.end()
    assert code in (0, -9, 143), f"exit code {code}: {program.lines[-5:]} {program.log[-20:]}"
    seen = [
        (int(step), tuple(map(int, samples)))
        for _, step, *samples in (line.split() for line in program.lines if line[:4] == "SEEN")
    ]
    return [each for each in seen if each[0] != seen[-1][0]] if code and not whole else seen


def run(target: str, text: str, *arguments: str, stop: int = -1) -> Seen:
    """One worker's program, from its start to its end."""
    with started(target, text, *arguments, stop=stop) as program:
        return ended(program)


def run_all(
    target: str, text: str, worker_count: int, environment: Mapping[str, str] | None = None
) -> list[Seen]:
    """The program of all ranks, which a launcher starts at once."""
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                started(target, text, rank=rank, worker_count=worker_count, environment=environment)
            )
            for rank in range(worker_count)
        ]
        return [ended(program) for program in programs]


def times(*seen: Seen) -> Counter[int]:
    """How often each sample was seen."""
    return Counter(sample for each in seen for _, samples in each for sample in samples)


def each_sample(count: int, samples: Iterable[int] = range(COUNT)) -> Counter[int]:
    """Each sample as often."""
    return Counter(dict.fromkeys(samples, count))


def batches(seen: Seen) -> Sequence[tuple[int, ...]]:
    """The batches, without their steps."""
    return [samples for _, samples in seen]
