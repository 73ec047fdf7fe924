"""A worker process that visits the samples it is dealt: weights count how often each has counted.

python visiting_worker.py TARGET WORKER_ID PLAN, the last as JSON

The parameter has an element for each sample in each epoch, `copies` times in a row: copies of one
are in chunks of different shards. A gradient has -1 at those of its batch. Elastic members train by
a rule that moves an element by 1 where it has a gradient, whatever the others give: a member that
gives nothing in a step counts in the rate of `reference_count`.

A fixed crew has `worker_count` in place of those fields of `Elastic`.

PLAN: `length`, `batch_size`, `epochs`, `copies`, fields of `Elastic`, `min_contributors`,
`grace_s`, `late`, `pause_s` between two steps, `same_host`, `keeps_state`: an object that counts
steps, whose count is the step in each. It prints a line a step, to stderr as
well if the step has only a part of its gradient, and ends once all have counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import shardwell

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.data.visit_plan import NAME, SIGN
from harness.programs.commands import Program

PATH = Path(__file__)
SEED = 5
IN_PART = "counted in part"
_ELASTIC = ("min_count", "max_count", "member_return_s", "member_lease_s", "reference_count")
_OPTIONS = ("min_contributors", "grace_s", "late")


def opened(client: shardwell.Client, plan: dict[str, Any]) -> shardwell.Parameter:
    """The parameter that counts."""
    exact = plan.get("reference_count", 0)
    net = client.parameter(
        NAME,
        size=plan["copies"] * plan["epochs"] * plan["length"],
        optimizer=shardwell.SGD(1.0) if exact else SIGN,
        codec="fp32",
        **_crew(plan),
        **{name: plan[name] for name in _OPTIONS if name in plan},
    )
    net.init(np.zeros(net.size, np.float32))
    return net


def _crew(plan: dict[str, Any]) -> dict[str, Any]:
    if "worker_count" in plan:
        return {"worker_count": plan["worker_count"]}
    return {"members": shardwell.Elastic(**{n: plan[n] for n in _ELASTIC if n in plan})}


def samples_of(plan: dict[str, Any]) -> shardwell.Samples:
    """The data."""
    return shardwell.Samples(plan["length"], plan["batch_size"], seed=SEED)


def gradient_of(plan: dict[str, Any], batch: shardwell.Batch) -> npt.NDArray[np.float32]:
    """-1 at the elements of a batch's samples; a fixed crew's may be of two epochs."""
    found = np.zeros((plan["copies"], plan["epochs"], plan["length"]), np.float32)
    positions = np.concatenate([np.arange(*each) for each in batch.ranges])
    found[:, positions // plan["length"], batch.indices] = -1.0
    return found.reshape(-1)


def visited(net: shardwell.Parameter, plan: dict[str, Any]) -> Iterator[None]:
    """Visits all that it is dealt, and says so after each step."""
    progress = {"steps": 0}
    if plan.get("keeps_state"):
        net.keep_state({"progress": progress})
    for batch in net.batches(samples_of(plan), epochs=plan["epochs"]):
        net.exchange(gradient_of(plan, batch), batch=batch)
        assert net.outcome is not None
        if plan.get("keeps_state") and net.outcome.counted != "none":
            assert progress["steps"] == net.outcome.step, (progress, net.outcome)
        progress["steps"] += 1
        yield


class VisitingWorker(Program):
    """Such a process, started."""

    def __init__(self, target: str, worker_id: str, plan: dict[str, Any]) -> None:
        super().__init__(str(PATH), target, worker_id, json.dumps(plan), is_forked=True)
        self.worker_id = worker_id


def main() -> None:
    """Visits all that it is dealt."""
    target, worker_id, text = sys.argv[1:]
    plan: dict[str, Any] = json.loads(text)
    with shardwell.connect(
        target, worker_id=worker_id, timeout_s=40.0, same_host=plan.get("same_host", True)
    ) as client:
        net = opened(client, plan)
        for _ in visited(net, plan):
            assert net.outcome is not None
            print(f"step {net.outcome.step} {net.outcome.counted}", flush=True)
            if net.outcome.counted == "part":
                print(IN_PART, file=sys.stderr, flush=True)
            time.sleep(plan.get("pause_s", 0.0))


if __name__ == "__main__":
    main()
