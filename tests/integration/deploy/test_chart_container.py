"""Goal: the containers that the chart and the job describe do their work as they describe them:
with that user, those mounts, a read-only root, no capability, and probes that are answered.

Method: Helm renders a release of two shards, the commands of its notes make the secrets, and a real
Docker engine runs the container of each pod with all that the pod says; the probes are asked from
outside, as the kubelet asks them. Then two containers of the job train on them. Skipped where there
is no engine. Images are built, on $SHARDWELL_BASE if that is set, or with $SHARDWELL_TEST_TAG
are those that have that tag.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import ssl
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.deploy.chart import (
    JOB,
    SECURED,
    Object,
    Values,
    container_of,
    files_of,
    objects_of,
    pod_of,
    secrets_of,
    shard_settings,
    worker_settings,
)
from harness.deploy.engine import Container, build, docker, skip_without
from harness.polling import PATIENCE_S, eventually
from harness.programs.ports import free_port
from shardwell.client import TARGET_VARIABLE

if importlib.util.find_spec("helm_python") is None:  # not importorskip: see render_chart.py
    pytest.skip(
        "could not find 'helm_python': pip install helm-python-sdk", allow_module_level=True
    )
pytestmark = [
    pytest.mark.containers,
    pytest.mark.timeout(2400),  # images are built
]

SHARD_COUNT = 2
GRPC_PORT, ADMIN_PORT = 7070, 7071
NAMES = {"startup": "startupProbe", "live": "livenessProbe", "ready": "readinessProbe"}
WRITABLE = {"/data", "/tmp"}
SIZE_BYTES_MAX = 200e6
"""Of the image above its base."""
TRAINING_TIMEOUT_S = 180.0
KILLED = 137
"""The exit code of a container that was."""


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    """By the names that the chart and the job have for them."""
    skip_without("info")
    tag = os.environ.get("SHARDWELL_TEST_TAG")
    names = ("shardwell", "shardwell-demo")
    return {name: f"{name}:{tag}" if tag else build(name, "of-tests") for name in names}


def test_the_image_of_shards_has_no_scikit_learn_and_is_small(images) -> None:
    printed = docker(
        *("history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}"),
        images["shardwell"],
    )
    layers = [line.partition(" ") for line in printed.splitlines()]  # the newest first
    (first,) = [i for i, (_, _, made_by) in enumerate(layers) if "groupadd --gid" in made_by]
    assert 10e6 < sum(int(size) for size, _, _ in layers[: first + 1]) < SIZE_BYTES_MAX
    look = ("-c", "import importlib.util as u; print(u.find_spec('sklearn') is not None)")
    for name, has in (("shardwell", "False"), ("shardwell-demo", "True")):
        assert docker("run", "--rm", "--entrypoint", "python", images[name], *look) == has


class Shard(NamedTuple):
    """One of the release."""

    container: Container
    settings: dict[str, str]
    admin_port: int
    """On this machine."""
    scheme: str

    def answers(self, path: str, token: str = "") -> tuple[int, bytes]:
        """What the admin port says; as the kubelet, it does not look at the certificate."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=PATIENCE_S)
        if self.scheme == "HTTPS":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(
                "127.0.0.1", self.admin_port, timeout=PATIENCE_S, context=context
            )
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()

    def probe(self, kind: str) -> int:
        """The status that a probe of the pod gets; 0: no answer."""
        probe = container_of(self.container.pod)[NAMES[kind]]["httpGet"]
        ports = {p["name"]: p["containerPort"] for p in container_of(self.container.pod)["ports"]}
        assert (ports[probe["port"]], probe["scheme"]) == (ADMIN_PORT, self.scheme)
        try:
            return self.answers(probe["path"])[0]
        except (OSError, http.client.HTTPException):
            return 0

    def become_ready(self) -> None:
        """Waits as the kubelet does: for its start, then for its readiness."""
        for kind in ("startup", "live", "ready"):
            eventually(f"{kind} is 200: {self.container.log}", lambda k=kind: self.probe(k) == 200)


class Release(NamedTuple):
    """An installed release."""

    shards: list[Shard]
    worker_secrets: dict[str, dict[str, bytes]]
    network: str


@contextlib.contextmanager
def installed(
    values: Values, secrets: dict[str, dict[str, bytes]], image: str, directory: Path
) -> Iterator[tuple[list[Shard], str]]:
    """The shards of a release, which have just been started, and their network."""
    pod, stateful = pod_of(values), objects_of(values)["StatefulSet"]
    assert container_of(pod)["image"].partition(":")[0] == "shardwell"
    name = f"chart-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        docker("network", "create", name)
        stack.callback(docker, "network", "rm", name)
        shards = []
        for index in range(values["shardCount"]):
            settings = shard_settings(pod, index)
            host = settings[TARGET_VARIABLE].split(",")[index].rpartition(":")[0]
            assert host.startswith(f"{stateful['metadata']['name']}-{index}.")
            admin_port = free_port()
            container = Container(
                pod,
                name=f"{name}-{index}",
                image=image,
                settings=settings,
                secrets=secrets,
                directory=directory / f"shard-{index}",
                network=name,
                host=host,
                ports={ADMIN_PORT: admin_port},
            )
            scheme = "HTTP" if values.get("insecure") else "HTTPS"
            shards.append(Shard(stack.enter_context(container), settings, admin_port, scheme))
        yield shards, name


@pytest.fixture(scope="module")
def release(images, tmp_path_factory) -> Iterator[Release]:
    """Shards whose probes are all answered with 200."""
    directory = tmp_path_factory.mktemp("release")
    tokens = {**SECURED["tokens"], "statusTokenKey": "status"}
    values = {**SECURED, "tokens": tokens, "shardCount": SHARD_COUNT, "auditLog": True}
    secrets = secrets_of(files_of(values)["NOTES.txt"], directory)
    own = {name: secrets.pop(name) for name in ("shardwell-tls", "shardwell-tokens")}
    with installed(values, own, images["shardwell"], directory) as (shards, network):
        for shard in shards:
            shard.become_ready()
        yield Release(shards, secrets, network)


def test_a_shard_without_tls_tokens_and_volume(images, tmp_path) -> None:
    values = {"insecure": True, "persistence": {"enabled": False}, "shardCount": 1}
    with installed(values, {}, images["shardwell"], tmp_path) as ((shard,), _):
        shard.become_ready()
        code, printed = shard.container.run("shardwell", "status")
        assert (code, printed.count("serving")) == (0, 1), printed
        assert shard.answers("/status.json")[0] == 200
        assert shard.container.stop() == 0, shard.container.log


def test_it_may_do_nothing_that_it_need_not(release) -> None:
    user = release.shards[0].container.pod["securityContext"]
    code, printed = release.shards[0].container.run("cat", "/proc/1/status")
    assert code == 0
    found = dict(re.findall(r"^(\w+):\s*(.*)$", printed, re.M))
    assert {*found["Uid"].split()} == {str(user["runAsUser"])}
    assert {*found["Gid"].split()} == {str(user["runAsGroup"])}
    assert {int(found[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert found["NoNewPrivs"] == "1"


def test_it_writes_to_its_data_and_tmp_alone(release) -> None:
    container = release.shards[0].container
    code, printed = container.run(
        "sh", "-c", "for d in / /opt /etc /var /var/tmp /home/* /run /credentials/* /data /tmp; do "
        "if touch $d/.written 2>/dev/null; then echo $d; rm $d/.written; fi; done"
    )  # fmt: skip
    assert code == 0
    assert {*printed.split()} == WRITABLE
    directory = release.shards[0].settings["SHARDWELL_DATA_DIR"]
    code, printed = container.run("stat", "-c", "%A %u", directory)
    assert (code, printed.split()) == (0, ["drwx--S---", "10001"])  # S: of the volume's root


def test_health_and_status_are_asked_inside_with_its_own_variables(release) -> None:
    container = release.shards[0].container
    code, printed = container.run("shardwell", "status")
    assert code == 0, printed
    assert printed.count("serving") == SHARD_COUNT


def test_the_page_shows_all_shards_and_asks_for_a_token(release) -> None:
    assert release.shards[0].answers("/status.json")[0] == 401
    token = release.worker_secrets["shardwell-worker-token"]["token"].decode().strip()

    def states() -> bool:
        status, body = release.shards[0].answers("/status.json", token)
        assert status == 200
        return [each["state"] for each in json.loads(body)["shards"]] == ["serving"] * SHARD_COUNT

    eventually("the page shows all shards", states)
    assert release.shards[1].answers("/metrics", token)[0] == 200


@contextlib.contextmanager
def worker_of(
    release: Release, images: dict[str, str], directory: Path, index: int
) -> Iterator[Container]:
    """The container of one of the job's workers; two train on the shards that there are."""
    pod: Object = JOB["spec"]["template"]["spec"]
    settings = worker_settings(index)
    target = settings[TARGET_VARIABLE].split(",")[:SHARD_COUNT]
    settings |= {TARGET_VARIABLE: ",".join(target), "SHARDWELL_WORKER_COUNT": "2"}
    with Container(
        pod,
        name=f"{release.network}-worker-{index}",
        image=images[container_of(pod)["image"].partition(":")[0]],
        settings=settings,
        secrets=release.worker_secrets,
        directory=directory / str(index),
        network=release.network,
    ) as container:
        yield container


def has_ended(worker: Container) -> bool:
    return bool(worker.state["Status"] == "exited")


def test_the_job_trains_though_one_shard_is_killed_and_one_stopped(
    release, images, tmp_path
) -> None:
    """Both in the middle of a step; they come back from their volumes, and the step goes on."""
    killed, stopped = release.shards
    with worker_of(release, images, tmp_path, 0) as first:
        eventually(
            f"worker-0 waits for worker-1: {first.log}",
            lambda: "in: worker-0" in killed.container.run("shardwell", "status")[1],
        )
        killed.container.kill()
        assert killed.container.state["ExitCode"] == KILLED
        killed.container.start()
        killed.become_ready()
        assert stopped.container.stop() == 0, stopped.container.log
        assert "shard has stopped" in stopped.container.log
        stopped.container.start()
        stopped.become_ready()
        assert not has_ended(first), first.log
        with worker_of(release, images, tmp_path, 1) as second:
            for worker in (first, second):
                eventually(
                    "the workers end", lambda w=worker: has_ended(w), timeout_s=TRAINING_TIMEOUT_S
                )
                assert worker.state["ExitCode"] == 0, worker.log
                assert "Passed: held-out accuracy" in worker.log
    code, printed = release.shards[0].container.run("cat", "/data/audit.log")
    assert code == 0
    assert '"digits"' in printed
