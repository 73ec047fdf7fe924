"""Goal: a JAX training goes on while workers come, die, stand still and come back.

Method: worker processes with first weights of their own, whose steps are compiled programs that
exchange. Replicas that have counted one step have the same bits after it.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

import shardwell
from harness.programs.elastic_training import ElasticTraining, counted_by

jax = pytest.importorskip("jax", reason="JAX is not installed; it is not a dependency")
import shardwell.jax  # noqa: E402

PROGRAM = Path(__file__).parents[2] / "harness/programs/elastic_jax_worker.py"


def test_one_is_killed_and_another_is_stopped(tmp_path) -> None:
    with contextlib.ExitStack() as stack:
        bounds = {"member_return_s": 0.5, "member_lease_s": 2.0}
        run = ElasticTraining(stack, tmp_path, PROGRAM, **bounds)
        first, second = (run.start(f"w{n}", seed=n) for n in range(2))
        first.until(counted_by("w0", "w1"))
        second.process.kill()
        lost = first.until(counted_by("w0"))
        again = run.start("w2", seed=2)
        assert again.found[0]["opened"] >= lost["version"]
        again.until(counted_by("w0", "w2"))
        again.send(signal.SIGSTOP)
        first.until(counted_by("w0"))
        again.send(signal.SIGCONT)
        again.until(counted_by("w0", "w2"))
        for _ in range(10):
            again.read()
        run.finish()


def test_members_of_a_tree_are_given_once(cluster, connect) -> None:
    client = connect(cluster(1), "w0")

    def opened(**options):
        weights = {"kernel": jax.numpy.ones((4, 3))}
        given = {"optimizer": shardwell.SGD(0.1), "codec": "fp32", **options}
        return shardwell.jax.TreeParameter(client, "net", weights, **given)

    elastic = shardwell.Elastic(max_count=4)
    with pytest.raises(shardwell.ArgumentError, match="worker_count= and members= both"):
        opened(worker_count=2, members=elastic)
    with pytest.raises(shardwell.ArgumentError, match="late must be 'drop' or 'carry'"):
        opened(members=elastic, late="never")
    net = opened(members=elastic, min_contributors=1, grace_s=0.5, late="carry")
    assert net.outcome is None
    weights = net.exchange({"kernel": jax.numpy.ones((4, 3))})
    assert float(weights["kernel"][0, 0]) == pytest.approx(0.9)
    assert (net.outcome.counted, net.outcome.contributors) == ("all", ("w0",))
