"""The chart as Helm renders it, and what the kubelet makes of a pod: variables and files."""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from harness.programs.commands import run_command

Values = dict[str, Any]
Object = dict[str, Any]

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/helm/shardwell"
JOB: Object = yaml.safe_load((ROOT / "examples/kubernetes/worker-job.yaml").read_text())
INDEX_LABEL = "apps.kubernetes.io/pod-index"
SECURED: Values = {
    "tls": {"existingSecret": "shardwell-tls"},
    "tokens": {"existingSecret": "shardwell-tokens"},
}


class StrictLoader(yaml.SafeLoader):
    """Refuses a name that comes twice, as Kubernetes does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        assert len(found) == len(node.value), f"a name comes twice in {found}"
        return found


@functools.cache
def _rendered(given: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("render_chart.py")],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def rendered(
    values: Values, *, release: str = "shardwell", namespace: str = "training", chart: Path = CHART
) -> dict[str, Any]:
    """What Helm makes of it: its files or an error, and what `helm lint` says."""
    given = {"chart": str(chart), "values": values, "release": release, "namespace": namespace}
    return copy.deepcopy(_rendered(json.dumps(given)))


def files_of(values: Values, **options: Any) -> dict[str, str]:
    """Each rendered file by its name; fails where it is refused."""
    found = rendered(values, **options)
    assert "error" not in found, found["error"]["message"]
    return {Path(name).name: text for name, text in found["files"].items()}


def objects_of(values: Values, **options: Any) -> dict[str, Object]:
    """Each rendered object by its kind, of which the chart has one each."""
    texts = (text for name, text in files_of(values, **options).items() if name != "NOTES.txt")
    objects = [o for text in texts for o in yaml.load_all(text, StrictLoader) if o]
    by_kind = {each["kind"]: each for each in objects}
    assert len(by_kind) == len(objects)
    return by_kind


def pod_of(values: Values, **options: Any) -> Object:
    """The pod's spec of the StatefulSet."""
    spec: Object = objects_of(values, **options)["StatefulSet"]["spec"]["template"]["spec"]
    return spec


def container_of(pod: Object) -> Object:
    (container,) = pod["containers"]
    return container


def settings_of(pod: Object, **from_fields: str) -> dict[str, str]:
    """Its environment, as the kubelet gives it to a pod whose fields have these values."""
    settings: dict[str, str] = {}
    for entry in container_of(pod)["env"]:
        assert entry["name"] not in settings
        value = entry.get("value")
        if value is None:
            value = from_fields[
                re.search(r"'(.*)'", entry["valueFrom"]["fieldRef"]["fieldPath"])[1]
            ]
        settings[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: settings[m[1]], value)
    return settings


def shard_settings(pod: Object, index: int = 0) -> dict[str, str]:
    return settings_of(pod, **{INDEX_LABEL: str(index)})


def mounts_of(pod: Object) -> list[Object]:
    found: list[Object] = container_of(pod)["volumeMounts"]
    return found


def worker_settings(index: int) -> dict[str, str]:
    pod = JOB["spec"]["template"]["spec"]
    return settings_of(pod, **{"batch.kubernetes.io/job-completion-index": str(index)})


def secrets_of(notes: str, directory: Path) -> dict[str, dict[str, bytes]]:
    """Runs the commands of the notes; what `kubectl create secret` would keep."""
    secrets = {}
    for line in notes.splitlines():
        match shlex.split(line) if line.startswith("  ") else ():
            case ["shardwell", command, *words]:
                here = [f"{directory}/{w}" if w.startswith("certs") else w for w in words]
                code, _, log = run_command(command, *here)
                assert code == 0, log
            case ["kubectl", "-n", "training", "create", "secret", "generic", name, *files]:
                pairs = (file.removeprefix("--from-file=").split("=") for file in files)
                secrets[name] = {key: (directory / path).read_bytes() for key, path in pairs}
    return secrets


def lay_out(pod: Object, secrets: dict[str, dict[str, bytes]], root: Path) -> None:
    """Makes its volumes under a directory, as the kubelet does, and writes its secrets there."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in mounts_of(pod):
        directory = root / mount["mountPath"].lstrip("/")
        directory.mkdir(parents=True)
        if secret := volumes.get(mount["name"], {}).get("secret"):
            found = secrets[secret["secretName"]]
            items = secret.get("items") or [{"key": key, "path": key} for key in found]
            (directory / "..1").mkdir()
            (directory / "..data").symlink_to("..1")
            for item in items:
                file = directory / "..1" / item["path"]
                file.write_bytes(found[item["key"]])
                file.chmod(secret["defaultMode"])
                (directory / item["path"]).symlink_to(f"..data/{item['path']}")
