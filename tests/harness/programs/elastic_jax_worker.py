"""A worker process that trains a pytree as an elastic member; see elastic_training.py.

OPTIONS: `member_return_s`, `member_lease_s`, and `pause_s` between two steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwell
import shardwell.jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.polling import eventually

PATH = Path(__file__)


def digest_of(tree: Any) -> str:
    """A digest of a tree's leaves."""
    found = hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """Trains, and prints a line a step."""
    target, worker_id, seed, stop, given = sys.argv[1:6]
    options: dict[str, Any] = json.loads(given)
    stop_file, never = Path(stop), threading.Event()
    bounds = {key: options[key] for key in ("member_return_s", "member_lease_s") if key in options}
    first = {"kernel": jax.random.normal(jax.random.key(int(seed)), (20, 3)), "bias": jnp.zeros(3)}
    with shardwell.connect(target, worker_id=worker_id, timeout_s=40.0) as client:
        net = shardwell.jax.TreeParameter(
            client,
            "tree",
            first,
            optimizer=shardwell.SGD(0.2, momentum=0.5),
            members=shardwell.Elastic(max_count=8, **bounds),
        )

        @jax.jit
        def train_step(weights: Any, key: Any) -> Any:
            inputs = jax.random.normal(key, (32, 20))

            def loss_of(weights: Any) -> Any:
                return jnp.square(
                    inputs @ weights["kernel"] + weights["bias"] - inputs[:, :3]
                ).mean()

            loss, gradient = jax.value_and_grad(loss_of)(weights)
            return net.exchange(gradient), loss

        weights = net.get_weights()
        opened = {"opened": net.parameter.next_step, "digest": digest_of(weights)}
        print(json.dumps(opened), flush=True)
        count = 0
        while not stop_file.exists():
            count += 1
            with shardwell.jax.named_errors():
                key = jax.random.key(1000 * sum(worker_id.encode()) + count)
                weights, loss = train_step(weights, key)
            outcome = net.outcome
            assert outcome is not None
            found = {
                "step": outcome.step,
                "counted": outcome.counted,
                "contributors": outcome.contributors,
                "version": net.parameter.version,
                "loss": float(loss),
                "digest": digest_of(weights),
            }
            print(json.dumps(found), flush=True)
            never.wait(options.get("pause_s", 0.0))
        net.parameter.leave()
        print(json.dumps({"left": net.parameter.next_step}), flush=True)
        with contextlib.suppress(AssertionError):
            eventually("all have left", lambda: stop_file.read_text() == "all")
        final = net.get_weights()
        print(json.dumps({"final": digest_of(final), "version": net.parameter.version}), flush=True)


if __name__ == "__main__":
    main()
