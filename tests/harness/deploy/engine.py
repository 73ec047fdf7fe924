"""Containers of a real Docker engine, made as the kubelet makes those of a pod."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.deploy.chart import ROOT, Object, container_of, lay_out, mounts_of

COMMAND_TIMEOUT_S = 60.0
BUILD_TIMEOUT_S = 1800.0
_UNITS = {"Mi": 2**20, "Gi": 2**30, "M": 10**6, "G": 10**9}


def skip_without(*command: str) -> None:
    """Skips a test where a command of `docker`, which only asks, fails; says what it says."""
    if shutil.which("docker") is None:
        pytest.skip("there is no docker")
    ran = subprocess.run(
        ["docker", *command], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    if ran.returncode:
        pytest.skip(f"docker {' '.join(command)} fails: {' '.join(ran.stderr.split())[:200]}")


def docker(*arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, cwd: Path = ROOT) -> str:
    """What `docker ARGUMENTS` prints; fails if it does."""
    ran = subprocess.run(
        ["docker", *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout_s
    )
    assert ran.returncode == 0, (arguments, ran.stdout[-2000:], ran.stderr[-2000:])
    return ran.stdout.strip()


def build(target: str, tag: str) -> str:
    """Makes an image of deploy/Dockerfile, on $SHARDWELL_BASE if that is set; its name."""
    image = f"{target}:{tag}"
    base = os.environ.get("SHARDWELL_BASE")
    docker(
        *("build", "--quiet", "--file", "deploy/Dockerfile"),
        *(["--build-arg", f"BASE={base}"] if base else []),
        *("--target", target, "--tag", image, "."),
        timeout_s=BUILD_TIMEOUT_S,
    )
    return image


class Container:
    """The only container of a pod, run by the engine. A context manager that removes all of it.

    User and groups, capabilities, the root's mode, limits and volumes are the pod's. A claim or an
    empty directory is a volume whose root is the superuser's and the pod's group's, as the kubelet
    leaves it, with none of what the image has at its place; how large it may get is not enforced. A
    secret is a directory of links that lead to files.

    Args:
        pod: Its spec.
        name: Name of the container.
        image: The image that is run instead of the pod's, whose name is a registry's.
        settings: Its environment, resolved.
        secrets: Files by the names of secrets.
        directory: Where secrets are written.
        network: The engine's network, on which it is reached by `host`.
        host: A whole name.
        ports: Ports of this machine, by those of the container.
    """

    def __init__(
        self,
        pod: Object,
        *,
        name: str,
        image: str,
        settings: Mapping[str, str],
        secrets: dict[str, dict[str, bytes]],
        directory: Path,
        network: str,
        host: str = "",
        ports: Mapping[int, int] | None = None,
    ) -> None:
        self.pod = pod
        self.name = name
        self._image = image
        self._settings = settings
        self._directory = directory
        self._network = network
        self._host = host
        self._ports = ports or {}
        self._volumes: list[str] = []
        lay_out(pod, secrets, directory)

    def __enter__(self) -> Container:
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            docker("create", *self._flags(), self._image, *container_of(self.pod)["args"])
            docker("start", self.name)
            stack.pop_all()
        return self

    def __exit__(self, *reason: object) -> None:
        self._remove()

    def _remove(self) -> None:
        for arguments in (
            ("rm", "--force", "--volumes", self.name),
            *(("volume", "rm", "--force", volume) for volume in self._volumes),
        ):
            subprocess.run(
                ["docker", *arguments], capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
            )

    def _flags(self) -> Iterator[str]:
        container, user = container_of(self.pod), self.pod["securityContext"]
        known = {"name", "image", "imagePullPolicy", "args", "securityContext", "env", "ports",
                 "startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "resources",
                 "volumeMounts"}  # fmt: skip
        assert container.keys() <= known, "what this does not know, it would leave out"
        yield from ("--name", self.name, "--network", self._network)
        if self._host:
            yield from ("--network-alias", self._host)
        for inside, here in self._ports.items():
            yield from ("--publish", f"127.0.0.1:{here}:{inside}")
        yield from ("--user", f"{user['runAsUser']}:{user['runAsGroup']}")
        yield from ("--group-add", str(user["fsGroup"]))
        may = container["securityContext"]
        if may["readOnlyRootFilesystem"]:
            yield "--read-only"
        if not may["allowPrivilegeEscalation"]:
            yield from ("--security-opt", "no-new-privileges")
        for capability in may["capabilities"]["drop"]:
            yield from ("--cap-drop", capability)
        memory = size_bytes(container["resources"]["limits"]["memory"])
        yield from ("--memory", str(memory), "--memory-swap", str(memory))  # nodes have no swap
        yield "--no-healthcheck"  # which Kubernetes does not ask
        for variable, value in self._settings.items():
            yield from ("--env", f"{variable}={value}")
        yield from self._mounts()

    def _mounts(self) -> Iterator[str]:
        group = str(self.pod["securityContext"]["fsGroup"])
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        for mount in mounts_of(self.pod):
            path, volume = mount["mountPath"], volumes.get(mount["name"])
            if volume is None or "emptyDir" in volume:  # the first is a claim
                assert volume is None or "medium" not in volume["emptyDir"]
                own = f"{self.name}-{mount['name']}"
                self._volumes.append(own)
                docker("volume", "create", own)
                yield from ("--mount", f"type=volume,src={own},dst={path},volume-nocopy")
                mode = "2775" if volume is None else "2777"
                self._own(f"type=volume,src={own},dst=/mnt,volume-nocopy", group, mode)
            else:
                here = self._directory / path.lstrip("/")
                assert mount["readOnly"] is True
                yield from ("--mount", f"type=bind,src={here},dst={path},readonly")
                self._own(f"type=bind,src={here}/..1,dst=/mnt", group, "0755")

    def _own(self, mount: str, group: str, mode: str) -> None:
        """Gives it to the pod's group; modes of files stay."""
        change = f"chown -R 0:{group} /mnt && chmod {mode} /mnt"
        docker(
            *("run", "--rm", "--user", "0:0", "--network", "none", "--entrypoint", "sh"),
            *("--mount", mount, self._image, "-c", change),
        )

    @property
    def state(self) -> dict[str, Any]:
        """What the engine says of it."""
        found: dict[str, Any] = json.loads(docker("inspect", self.name))[0]["State"]
        return found

    def run(self, *command: str) -> tuple[int, str]:
        """The exit code of a command inside, and what it prints."""
        ran = subprocess.run(
            ["docker", "exec", self.name, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        return ran.returncode, ran.stdout

    def stop(self) -> int:
        """Ends it as the kubelet does; its exit code, 137 if it took longer than it may."""
        grace_s = self.pod["terminationGracePeriodSeconds"]
        hook = container_of(self.pod).get("lifecycle", {}).get("preStop")
        if hook:
            code, printed = self.run(*hook["exec"]["command"])
            assert code == 0, printed
        docker("stop", f"--time={grace_s}", self.name, timeout_s=grace_s + COMMAND_TIMEOUT_S)
        code: int = self.state["ExitCode"]
        return code

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        docker("kill", self.name)

    def start(self) -> None:
        """Starts it again with the same volumes, as a container of the same pod."""
        docker("start", self.name)

    @property
    def log(self) -> str:
        """What it has printed."""
        ran = subprocess.run(
            ["docker", "logs", self.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        return ran.stdout


def size_bytes(quantity: str) -> int:
    """What Kubernetes understands by it."""
    unit = quantity.lstrip("0123456789")
    return int(quantity.removesuffix(unit)) * _UNITS[unit]
