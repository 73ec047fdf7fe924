"""Goal: `docker compose up` does what docs/compose.md says, on a real engine: containers may do
nothing that they need not, and a script of this machine gets in by what the page says to type.

Method: the page's own commands are run by a shell in an empty directory, on a project of its own,
which is removed with its volumes. Skipped where there is no engine. $COMPOSE_FILE may add a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.deploy.engine import BUILD_TIMEOUT_S, docker, skip_without
from harness.polling import eventually

pytestmark = [
    pytest.mark.containers,
    pytest.mark.timeout(2400),  # images are built
]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/compose.md").read_text()
SHARDS = ["shard-0", "shard-1", "shard-2"]
WORKERS = ["worker-0", "worker-1", "worker-2", "worker-3"]
KILLED = 137
TRAINING_TIMEOUT_S = 180.0
MEMORY_BYTES = {"shard": 512 * 2**20, "worker": 512 * 2**20}
"""The page's; 256 MiB where it says nothing."""


class Project:
    """The cluster of docker-compose.yml, and a directory of a user who works with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SHARDWELL_")}
        if base := os.environ.get("SHARDWELL_BASE"):
            kept["SHARDWELL_BASE"] = base
        self._name = f"shardwell-{uuid.uuid4().hex[:8]}"
        # A shell's `python` and `shardwell` are those of the tests.
        path = f"{Path(sys.executable).parent}:{kept['PATH']}"
        self._environment = {
            "COMPOSE_FILE": str(ROOT / "docker-compose.yml"),
            **kept,
            "COMPOSE_PROJECT_NAME": self._name,
            "PATH": path,
        }

    def type(self, commands: str, *, timeout_s: float = BUILD_TIMEOUT_S) -> str:
        """Returns what a shell prints for typed commands; fails if one of them does."""
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert ran.returncode == 0, (commands, ran.stdout[-2000:], ran.stderr[-4000:])
        return ran.stdout

    def containers(self) -> dict[str, dict[str, Any]]:
        """What the engine says of each, by service."""
        label = f"label=com.docker.compose.project={self._name}"
        ids = docker("ps", "--all", "--quiet", "--filter", label).split()
        found = json.loads(docker("inspect", *ids)) if ids else []
        return {each["Config"]["Labels"]["com.docker.compose.service"]: each for each in found}

    def state(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = self.containers()[service]["State"]
        return found

    def run(self, service: str, *command: str) -> str:
        """What a command in a container prints."""
        return docker("exec", self.containers()[service]["Id"], *command)

    def become_healthy(self, service: str) -> None:
        eventually(
            f"{service} is healthy", lambda: self.state(service)["Health"]["Status"] == "healthy"
        )


def typed(heading: str) -> list[str]:
    """What the page tells people to type under a heading, a block each."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found: list[str] = re.findall(r"^```sh\n(.*?)^```", section, re.M | re.S)
    assert found
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """After `docker compose up`, when its workers have ended."""
    skip_without("info")
    skip_without("compose", "version")
    made = Project(tmp_path_factory.mktemp("project"))
    with contextlib.ExitStack() as stack:
        stack.callback(made.type, "docker compose --profile ports down --volumes")
        made.type("docker compose up --build --detach")
        for service in WORKERS:
            eventually(
                f"{service} ends",
                lambda s=service: made.state(s)["Status"] == "exited",
                timeout_s=TRAINING_TIMEOUT_S,
            )
        yield made


def test_workers_end_well_and_shards_are_healthy(project) -> None:
    found = project.containers()
    assert sorted(found) == sorted(["credentials", *SHARDS, *WORKERS])
    assert {found[name]["State"]["ExitCode"] for name in ("credentials", *WORKERS)} == {0}
    for service in SHARDS:
        project.become_healthy(service)
    assert not any("Health" in found[name]["State"] for name in ("credentials", *WORKERS))


def test_the_engine_contains_each_container(project) -> None:
    for service, container in project.containers().items():
        given = container["HostConfig"]
        assert container["Config"]["User"] == "10001:10001"
        assert given["ReadonlyRootfs"] is True
        assert (given["CapDrop"], given["CapAdd"] or []) == (["ALL"], [])
        assert given["Privileged"] is False
        assert given["SecurityOpt"] == ["no-new-privileges:true"]
        memory = MEMORY_BYTES.get(service.partition("-")[0], 256 * 2**20)
        assert (given["Memory"], given["MemorySwap"]) == (memory, memory)
        assert given["PidsLimit"] == 512
        assert given["LogConfig"] == {
            "Type": "json-file",
            "Config": {"max-size": "10m", "max-file": "3"},
        }
        assert not given["PortBindings"]


def test_a_shard_writes_to_its_volumes_and_tmp_alone(project) -> None:
    places = "/ /etc /opt /opt/shardwell /home/shardwell /var/tmp /data /tmp /run/shardwell /credentials/shards"  # noqa: E501
    printed = project.run(
        "shard-0",
        *("sh", "-c"),
        f"for d in {places}; do touch $d/.written 2>/dev/null && rm $d/.written && echo $d; done; "
        "cat /proc/1/status",
    )
    written = {line for line in printed.splitlines() if line.startswith("/")}
    assert written == {"/data", "/tmp", "/run/shardwell"}
    assert re.findall(r"^Cap\w+:\s+(\w+)$", printed, re.M) == ["0" * 16] * 5
    assert re.findall(r"^NoNewPrivs:\s+(\d)$", printed, re.M) == ["1"]


def test_a_script_of_this_machine_gets_in_as_the_page_says(project) -> None:
    before = {name: project.containers()[name]["State"]["StartedAt"] for name in SHARDS}
    (script,) = re.findall(r"`mine\.py`:\n\n```python\n(.*?)^```", PAGE, re.M | re.S)
    (project.directory / "mine.py").write_text(script)
    commands = [*typed("A script of your own"), "python mine.py\n", "python mine.py\n"]
    printed = project.type("".join(commands))
    assert re.search(r"(\[1\. 1\. 1\.\]\n){2}$", printed), printed
    bindings = project.containers()["ports"]["HostConfig"]["PortBindings"]
    assert {each["HostIp"] for given in bindings.values() for each in given} == {"127.0.0.1"}
    assert {*bindings} == {f"{port}/tcp" for port in (7070, 7071, 7072, 7080, 7081, 7082)}
    after = {name: project.containers()[name]["State"]["StartedAt"] for name in SHARDS}
    assert after == before  # no shard was made anew

    assert "serving" in project.type("".join(typed("The status page")))
    asked = "curl --silent --show-error --cacert certs/ca.pem --output /dev/null --write-out '%{http_code}'"  # noqa: E501
    url = "https://localhost:7082/status.json"
    assert project.type(f"{asked} {url}") == "401"
    token = "--header \"Authorization: Bearer $(cat status.token)\""  # fmt: skip
    assert project.type(f"{asked} {token} {url}") == "200"


def test_a_shard_that_was_killed_comes_back_with_up(project) -> None:
    before = project.run("shard-1", "shardwell", "status")
    docker("kill", project.containers()["shard-1"]["Id"])
    eventually("it is gone", lambda: project.state("shard-1")["Status"] == "exited")
    assert project.state("shard-1")["ExitCode"] == KILLED
    project.type("docker compose up --detach")
    project.become_healthy("shard-1")
    steps = r" digits +\d .* (\d+); done"
    after = project.run("shard-1", "shardwell", "status")
    assert re.findall(steps, after) == re.findall(steps, before) == ["500"] * len(SHARDS)
