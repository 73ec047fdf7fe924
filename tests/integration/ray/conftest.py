"""Ray on two nodes of this machine, each with an address of its own."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.leaks import Resources
from harness.polling import eventually

HEAD_HOST, OTHER_HOST = "127.0.0.2", "127.0.0.3"
TESTS = Path(__file__).parents[2]
NODE = {"include_dashboard": False, "object_store_memory": 100 << 20}
LOOKS = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""So that a node that is gone is noticed in two seconds instead of fifteen."""

WAIT_S = 60.0


class Nodes:
    """Two nodes, of which the second can be killed."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._other: Any = None

    @property
    def address(self) -> str:
        """What `ray.init(address=)` takes."""
        return str(self._cluster.address)

    def have_two(self) -> None:
        """Starts the second one, unless it runs."""
        if self._other is None:
            self._other = self._cluster.add_node(
                node_ip_address=OTHER_HOST, num_cpus=4, object_store_memory=100 << 20
            )

    def add(self, host: str) -> Any:
        """Another node, with 2 of the resource "outside"."""
        return self._cluster.add_node(
            node_ip_address=host,
            num_cpus=2,
            resources={"outside": 2},
            object_store_memory=100 << 20,
        )

    def remove(self, node: Any) -> None:
        """Ends it."""
        self._cluster.remove_node(node)

    def kill_other(self) -> None:
        """Ends all processes of the second one by force; its workers end by that."""
        other, self._other = self._other, None
        self._cluster.remove_node(other, allow_graceful=False)


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[Nodes]:
    """Ray with its two nodes, to which this process is connected."""
    ray = pytest.importorskip("ray", reason="Ray is not installed; make test-ray installs it")
    from ray.cluster_utils import Cluster

    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("its nodes are many processes; make test-ray runs these tests one by one")

    # Short, as Unix sockets are in it.
    home = tempfile.mkdtemp(prefix="ray-")
    kept = {name: os.environ.get(name) for name in ("RAY_TMPDIR", "PYTHONPATH")}
    os.environ.update(RAY_TMPDIR=home, PYTHONPATH=str(TESTS))
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # or Ray warns of a change to come
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **NODE,
            "node_ip_address": HEAD_HOST,
            "num_cpus": 8,
            "_system_config": LOOKS,
        },
    )
    try:
        nodes = Nodes(cluster)
        nodes.have_two()
        ray.init(address=cluster.address, _node_ip_address=HEAD_HOST, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def nodes(ray_nodes: Nodes) -> Nodes:
    """Both nodes, also after a test that has killed one."""
    ray_nodes.have_two()
    return ray_nodes


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """As for other tests; child processes are Ray's nodes, which are to have all their CPUs again.

    A test that uses no node starts none.
    """

    def found() -> Resources:
        return dataclasses.replace(Resources.now(), child_pids=frozenset())

    uses_nodes = "nodes" in request.fixturenames
    if uses_nodes:
        request.getfixturevalue("nodes")
    before = found()
    yield
    eventually("all is released", lambda: not found().beyond(before), timeout_s=WAIT_S)
    if uses_nodes:
        eventually("Ray has its CPUs again", _is_given_back, timeout_s=WAIT_S)


def _is_given_back() -> bool:
    import ray

    return ray.cluster_resources().get("CPU") == ray.available_resources().get("CPU")
