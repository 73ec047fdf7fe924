"""Goal: what the chart makes is what Kubernetes takes, and what it promises; nothing is open.

Method: Helm's own library renders the chart for several values; each object is checked against the
schemas of the oldest and the newest Kubernetes there are, strictly, and for its promises. Values
that are wrong are refused. The commands of the release's notes are run, their secrets laid out as
the kubelet does, and a real shard and a real worker have the settings of the rendered pod and of
the job in examples/kubernetes. test_chart_container.py runs their containers; what a cluster does
with all of it is not tried here.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import json
import re
import shutil
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from harness.deploy.chart import (
    CHART,
    JOB,
    ROOT,
    SECURED,
    Object,
    Values,
    container_of,
    files_of,
    lay_out,
    mounts_of,
    objects_of,
    pod_of,
    rendered,
    secrets_of,
    shard_settings,
    worker_settings,
)
from harness.programs.commands import Program, run_command
from harness.programs.ports import free_port
from shardwell.client import TARGET_VARIABLE
from shardwell.connection.credentials import INSECURE_VARIABLE, TOKEN_FILE_VARIABLE
from shardwell.connection.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, SERVER_NAME_VARIABLE
from shardwell_server.cli.digits import train_digits
from shardwell_server.cli.serve import serve
from shardwell_server.config import Limits

kubernetes_validate = pytest.importorskip("kubernetes_validate")
if importlib.util.find_spec("helm_python") is None:  # not importorskip: see render_chart.py
    pytest.skip(
        "could not find 'helm_python': pip install helm-python-sdk", allow_module_level=True
    )

DASHBOARD = ROOT / "deploy/grafana/shardwell.json"
DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
KUBERNETES_VERSIONS = ("1.29", kubernetes_validate.latest_version())
ADMIN_VARIABLE = "SHARDWELL_ADMIN_LISTEN"
GRPC_PORT, ADMIN_PORT = 7070, 7071
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
ON_NODE_ONLY = 0o440
VARIABLE_LENGTH_MAX = 128 * 1024 - len("SHARDWELL_SHARDS=\0")
"""Linux starts no program with a longer one."""

MONITORED: Values = {
    **SECURED,
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "tokenSecret": {"name": "reader", "key": "secret"},
    },
}
VALUES: dict[str, Values] = {
    "secured": SECURED,
    "insecure": {"insecure": True},
    "without-tokens": {"insecure": True, "tls": {"existingSecret": "a"}},
    "not-persistent": {**SECURED, "persistence": {"enabled": False}},
    "monitored": MONITORED,
    "everything": {
        **MONITORED,
        "shardCount": 5,
        "clusterId": "mine",
        "image": {"repository": "registry.example/a", "tag": "1", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "tls": {
            "existingSecret": "1234",
            "certKey": "a.pem",
            "keyKey": "a.key",
            "clientCaKey": "ca.pem",
        },
        "tokens": {
            "existingSecret": "t",
            "key": "all.json",
            "jwtKeysKey": "keys",
            "statusTokenKey": "reader",
        },
        "durability": 0.5,
        "persistence": {
            "size": "1Ti",
            "storageClassName": "7",
            "accessMode": "ReadWriteOncePod",
            "annotations": {"a": "b"},
        },
        "resources": {
            "requests": {"memory": "3Gi", "cpu": 2},
            "limits": {"memory": "4Gi", "cpu": "4", "ephemeral-storage": "1Gi"},
        },
        "limits": {
            field.name: getattr(Limits(), field.name) for field in dataclasses.fields(Limits)
        },
        "sessionLeaseS": 2.5,
        "auditLog": True,
        "logLevel": "debug",
        "listenHost": "[::]",
        "clusterDomain": "k8s.example",
        "networkPolicy": {"workerNamespaceLabels": {"team": "a"}},
        "podLabels": {"a": "1", "app.kubernetes.io/name": "other"},
        "podAnnotations": {"b": "2", "kubectl.kubernetes.io/default-container": "c"},
        "serviceAccountName": "8",
        "priorityClassName": "9",
        "nodeSelector": {"c": "3"},
        "tolerations": [{"key": "d", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
    },
}
each_values = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
each_version = pytest.mark.parametrize("version", KUBERNETES_VERSIONS)


def variables_of(command: click.Command) -> set[str]:
    names = [option.envvar or [] for option in command.params]
    return set(itertools.chain.from_iterable([n] if isinstance(n, str) else n for n in names))


@each_version
@each_values
def test_kubernetes_takes_each_object(values, version) -> None:
    found = objects_of(values)
    kinds = {"Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"}
    if (CHART / "files/shardwell.json").exists():
        kinds.add("ConfigMap")
    assert found.keys() - {"ServiceMonitor"} == kinds
    for kind in kinds:
        kubernetes_validate.validate(found[kind], version, strict=True)


@each_values
def test_helm_finds_nothing_to_warn_of(values) -> None:
    assert [entry for entry in rendered(values)["lint"] if entry["severity"] > 1] == []


@each_version
@pytest.mark.parametrize(
    ("release", "namespace"),
    [("shardwell", "007"), ("1e3-shardwell", "n"), ("my.release", "n"), ("r" * 53, "n" * 63)],
)
def test_names_are_names_whatever_the_release_is_called(release, namespace, version) -> None:
    count = SCHEMA["properties"]["shardCount"]["maximum"]
    found = objects_of({**MONITORED, "shardCount": count}, release=release, namespace=namespace)
    for kind, each in found.items():
        assert each["metadata"]["namespace"] == namespace
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == release
        if kind != "ServiceMonitor":
            kubernetes_validate.validate(each, version, strict=True)
    name = found["StatefulSet"]["metadata"]["name"]
    assert re.fullmatch(r"[a-z0-9][-a-z0-9]*[a-z0-9]", name)
    # A StatefulSet names pods, and adds a label of the revision, NAME-0123456789.
    assert max(len(f"{name}-{count}"), len(f"{name}-0123456789")) <= 63
    settings = shard_settings(found["StatefulSet"]["spec"]["template"]["spec"])
    assert max(map(len, settings.values())) < VARIABLE_LENGTH_MAX


@each_values
def test_shards_start_together_and_have_names_before_they_are_ready(values) -> None:
    found = objects_of(values)
    assert found["StatefulSet"]["spec"]["podManagementPolicy"] == "Parallel"
    service = found["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert found["StatefulSet"]["spec"]["serviceName"] == service["metadata"]["name"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert ports == {"grpc": GRPC_PORT, "admin": ADMIN_PORT}


@each_values
def test_selectors_find_the_pods_and_no_others(values) -> None:
    found = objects_of(values)
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    other = objects_of(values, release="other-shardwell")
    for kind, field in (
        ("Service", "selector"),
        ("StatefulSet", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        chosen, not_chosen = (each[kind]["spec"][field] for each in (found, other))
        assert chosen.get("matchLabels", chosen).items() <= labels.items()
        assert not not_chosen.get("matchLabels", not_chosen).items() <= labels.items()


@pytest.mark.parametrize("count", [1, 3, 12])
def test_each_pod_knows_its_index_the_count_and_all_addresses_in_order(count) -> None:
    values = {**SECURED, "shardCount": count}
    stateful = objects_of(values)["StatefulSet"]
    assert stateful["spec"]["replicas"] == count
    name, service = stateful["metadata"]["name"], stateful["spec"]["serviceName"]
    namespace = stateful["metadata"]["namespace"]
    for index in (0, count - 1):
        settings = shard_settings(pod_of(values), index)
        assert settings["SHARDWELL_SHARD_INDEX"] == str(index)
        assert settings["SHARDWELL_SHARD_COUNT"] == str(count)
        assert settings[TARGET_VARIABLE].split(",") == [
            f"{name}-{i}.{service}.{namespace}.svc.cluster.local:{GRPC_PORT}" for i in range(count)
        ]


def test_clusters_of_two_releases_or_namespaces_have_two_ids() -> None:
    places = itertools.product(("a", "b"), ("m", "n"))
    pods = [pod_of(SECURED, release=release, namespace=name) for release, name in places]
    assert len({shard_settings(pod)["SHARDWELL_CLUSTER_ID"] for pod in pods}) == 4
    assert shard_settings(pod_of({**SECURED, "clusterId": "x"}))["SHARDWELL_CLUSTER_ID"] == "x"


@each_values
def test_each_variable_is_one_that_a_shard_reads(values) -> None:
    of_status = {TARGET_VARIABLE, CA_VARIABLE, TOKEN_FILE_VARIABLE}
    read = variables_of(serve) | of_status
    assert shard_settings(pod_of(values)).keys() - read == set()


def test_limits_are_those_that_a_shard_has() -> None:
    fields = {field.name for field in dataclasses.fields(Limits)}
    assert SCHEMA["properties"]["limits"]["properties"].keys() == fields
    settings = shard_settings(pod_of(VALUES["everything"]))
    read = {
        name: type(default)(settings[f"SHARDWELL_{name.upper()}"])
        for name, default in dataclasses.asdict(Limits()).items()
    }
    assert Limits(**read) == Limits()


@each_values
def test_each_shard_has_a_volume_or_an_empty_directory(values) -> None:
    spec = objects_of(values)["StatefulSet"]["spec"]
    pod = spec["template"]["spec"]
    directory = Path(shard_settings(pod)["SHARDWELL_DATA_DIR"])
    (mounted,) = (m["name"] for m in mounts_of(pod) if Path(m["mountPath"]) in directory.parents)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    if values.get("persistence", {}).get("enabled", True):
        (claim,) = spec["volumeClaimTemplates"]
        size = {**DEFAULTS, **values}["persistence"]["size"]
        assert claim["metadata"]["name"] == mounted
        assert claim["spec"]["resources"]["requests"]["storage"] == size
        assert mounted not in volumes
        kept = {"whenDeleted": "Retain", "whenScaled": "Retain"}
        assert spec["persistentVolumeClaimRetentionPolicy"] == kept
    else:
        assert volumes[mounted]["emptyDir"] == {"sizeLimit": DEFAULTS["persistence"]["size"]}
        assert "volumeClaimTemplates" not in spec


@each_values
def test_one_shard_at_a_time_is_taken_by_drains(values) -> None:
    spec = objects_of(values)["PodDisruptionBudget"]["spec"]
    assert spec["maxUnavailable"] == 1
    assert "minAvailable" not in spec


@pytest.fixture(params=[*VALUES, "job"])
def pod(request: pytest.FixtureRequest) -> Object:
    """The pod of a shard for each of the values, and that of a worker."""
    if request.param == "job":
        return copy.deepcopy(JOB["spec"]["template"]["spec"])
    return pod_of(VALUES[request.param])


def test_a_pod_may_do_nothing_that_it_need_not(pod) -> None:
    uid = int(re.findall(r"useradd --uid (\d+)", (ROOT / "deploy/Dockerfile").read_text())[0])
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys()
    user = {k: v for k, v in pod["securityContext"].items() if k != "fsGroupChangePolicy"}
    assert user == {
        "runAsNonRoot": True,
        "runAsUser": uid,
        "runAsGroup": uid,
        "fsGroup": uid,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container_of(pod)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_pod_writes_to_its_data_and_tmp_alone(pod) -> None:
    mounts = {m["mountPath"]: m for m in mounts_of(pod)}
    written = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert written - {"/data"} == {"/tmp"}
    assert ("/data" in written) == ("SHARDWELL_DATA_DIR" in str(pod))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(volumes[mounts["/tmp"]["name"]]) == {"name", "emptyDir"}
    assert not any("hostPath" in volume for volume in volumes.values())


def test_a_pod_says_what_it_takes(pod) -> None:
    resources = container_of(pod)["resources"]
    assert {"cpu", "memory"} <= resources["requests"].keys()
    assert "memory" in resources["limits"]


def test_memory_is_three_times_the_weights_and_100_mb() -> None:
    """The weights that values.yaml speaks of."""
    text = (CHART / "values.yaml").read_text()
    weights_mb, elements_millions = re.search(
        r"for (\d+) MB of weights a shard, (\d+) million elements", text.replace("\n# ", " ")
    ).groups()
    assert int(weights_mb) == 4 * int(elements_millions)
    expected = f"{3 * int(weights_mb) + 100}M"
    resources = DEFAULTS["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == (expected, expected)


def test_secrets_are_mounted_so_that_they_are_renewed(pod) -> None:
    assert not any("subPath" in mount for mount in mounts_of(pod))
    for volume in pod["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == ON_NODE_ONLY


@pytest.mark.parametrize("name", ["secured", "without-tokens", "everything"])
def test_certificates_and_tokens_are_those_of_the_secrets_by_name(name) -> None:
    values = VALUES[name]
    pod = pod_of(values)
    settings = shard_settings(pod)
    tls, tokens = (DEFAULTS[k] | values.get(k, {}) for k in ("tls", "tokens"))
    expected = {
        CERT_VARIABLE: (tls["existingSecret"], tls["certKey"]),
        KEY_VARIABLE: (tls["existingSecret"], tls["keyKey"]),
        "SHARDWELL_TLS_CLIENT_CA": (tls["existingSecret"], tls["clientCaKey"]),
        CA_VARIABLE: (tls["existingSecret"], tls["clientCaKey"]),
        "SHARDWELL_TOKENS": (tokens["existingSecret"], tokens["key"]),
        "SHARDWELL_JWT_KEYS": (tokens["existingSecret"], tokens["jwtKeysKey"]),
        TOKEN_FILE_VARIABLE: (tokens["existingSecret"], tokens["statusTokenKey"]),
    }
    assert files_in_secrets(pod, settings) == {
        variable: source for variable, source in expected.items() if all(source)
    }


def files_in_secrets(pod: Object, settings: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The secret and its key behind each variable that is the path of one."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    found = {}
    for mount in mounts_of(pod):
        secret = volumes.get(mount["name"], {}).get("secret")
        for item in secret["items"] if secret else ():
            path = f"{mount['mountPath']}/{item['path']}"
            named = [variable for variable, value in settings.items() if value == path]
            assert named, f"{path} is mounted, and nothing says so"
            found.update(dict.fromkeys(named, (secret["secretName"], item["key"])))
    return found


def test_clients_need_no_certificate_without_an_authority_of_theirs() -> None:
    values = {**SECURED, "tls": {"existingSecret": "a", "clientCaKey": ""}}
    settings = shard_settings(pod_of(values))
    assert {CERT_VARIABLE, KEY_VARIABLE} <= settings.keys()
    assert not {"SHARDWELL_TLS_CLIENT_CA", CA_VARIABLE} & settings.keys()


@each_values
def test_open_to_strangers_only_where_that_is_wanted(values) -> None:
    settings = shard_settings(pod_of(values))
    assert (settings.get(INSECURE_VARIABLE) == "1") == values.get("insecure", False)
    assert ("SHARDWELL_TOKENS" in settings) == (not values.get("insecure"))


@each_values
def test_probes_ask_the_admin_port(values) -> None:
    pod = pod_of(values)
    container = container_of(pod)
    settings = shard_settings(pod)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    host = values.get("listenHost", "0.0.0.0")
    assert settings["SHARDWELL_LISTEN"] == f"{host}:{ports['grpc']}"
    assert settings[ADMIN_VARIABLE] == f"{host}:{ports['admin']}"
    scheme = "HTTPS" if CERT_VARIABLE in settings else "HTTP"
    for kind in ("startup", "live", "ready"):
        probe = container[{"live": "liveness", "ready": "readiness"}.get(kind, kind) + "Probe"]
        assert probe["httpGet"] == {"path": f"/{kind}", "port": "admin", "scheme": scheme}
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]


@pytest.mark.parametrize("timeout_s", [60, 61, 1800, 86400])
def test_a_shard_has_the_time_to_come_back_from_its_files(timeout_s) -> None:
    probe = container_of(pod_of({**SECURED, "startupTimeoutS": timeout_s}))["startupProbe"]
    assert timeout_s <= probe["failureThreshold"] * probe["periodSeconds"] < timeout_s + 5


@pytest.mark.parametrize(
    ("pre_stop_s", "grace_s", "margin_s"), [(3, 5, 22), (0, 0, 5), (10, 0.1, 5), (3, 7200, 60)]
)
def test_a_pod_has_longer_to_end_than_its_shard_takes(pre_stop_s, grace_s, margin_s) -> None:
    shutdown = {"preStopSleepS": pre_stop_s, "graceS": grace_s, "marginS": margin_s}
    pod = pod_of({**SECURED, "shutdown": shutdown})
    assert float(shard_settings(pod)["SHARDWELL_GRACE_S"]) == grace_s
    assert pod["terminationGracePeriodSeconds"] >= pre_stop_s + grace_s + margin_s
    hooks = container_of(pod).get("lifecycle", {})
    sleeps = {"preStop": {"exec": {"command": ["sleep", str(pre_stop_s)]}}}
    assert hooks == (sleeps if pre_stop_s else {})


def test_by_default_a_pod_sleeps_3_s_before_it_stops() -> None:
    pod = pod_of(SECURED)
    assert container_of(pod)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "3"]
    assert pod["terminationGracePeriodSeconds"] > 3 + float(
        shard_settings(pod)["SHARDWELL_GRACE_S"]
    )


WORKER = JOB["spec"]["template"]["metadata"]["labels"]
HERE, ELSEWHERE = {NAMESPACE_LABEL: "training"}, {NAMESPACE_LABEL: "other", "team": "a"}
MONITORING = {NAMESPACE_LABEL: "monitoring"}


def lets_in(policy: Object, labels: Values, namespace: Values, port: str) -> bool:
    """Whether a NetworkPolicy does, as Kubernetes describes it."""

    def is_chosen(selector: Object | None, found: Values) -> bool:
        return selector is not None and selector["matchLabels"].items() <= found.items()

    def is_from(peer: Object) -> bool:
        assert peer.keys() <= {"podSelector", "namespaceSelector"}
        if "namespaceSelector" not in peer:
            own = namespace[NAMESPACE_LABEL] == policy["metadata"]["namespace"]
            return own and is_chosen(peer["podSelector"], labels)
        chosen = is_chosen(peer["namespaceSelector"], namespace)
        return chosen and ("podSelector" not in peer or is_chosen(peer["podSelector"], labels))

    assert policy["spec"]["policyTypes"] == ["Ingress"]
    return any(
        any(map(is_from, rule["from"])) and any(p["port"] == port for p in rule["ports"])
        for rule in policy["spec"]["ingress"]
    )


@pytest.mark.parametrize(
    ("name", "who", "namespace", "ports"),
    [
        ("secured", "worker", HERE, {"grpc"}),
        ("secured", "shard", HERE, {"grpc"}),
        ("secured", "anybody", HERE, set()),
        ("secured", "worker", ELSEWHERE, set()),
        ("secured", "anybody", ELSEWHERE, set()),
        ("secured", "anybody", MONITORING, {"admin"}),
        ("secured", "worker", MONITORING, {"admin"}),
        ("everything", "worker", ELSEWHERE, {"grpc"}),
        ("everything", "anybody", ELSEWHERE, set()),
        ("everything", "worker", HERE, set()),
        ("everything", "shard", HERE, {"grpc"}),
    ],
)
def test_the_network_policy_lets_in(name, who, namespace, ports) -> None:
    found = objects_of(VALUES[name])
    shard = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    labels = {"worker": WORKER, "shard": shard, "anybody": {"app": "a"}}[who]
    policy = found["NetworkPolicy"]
    assert {p for p in ("grpc", "admin") if lets_in(policy, labels, namespace, p)} == ports


def test_no_network_policy_where_none_is_wanted() -> None:
    assert "NetworkPolicy" not in objects_of({**SECURED, "networkPolicy": {"enabled": False}})


@each_values
def test_metrics_are_scraped_only_where_that_is_wanted(values) -> None:
    found = objects_of(values)
    assert ("ServiceMonitor" in found) == ("serviceMonitor" in values)


def monitor_of(values: Values) -> Object:
    """The ServiceMonitor, whose schema no library brings; all but its endpoint is checked."""
    found = objects_of(values)
    monitor = found["ServiceMonitor"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    spec = monitor["spec"]
    assert spec.keys() == {"selector", "namespaceSelector", "endpoints"}
    assert spec["selector"]["matchLabels"].items() <= found["Service"]["metadata"]["labels"].items()
    assert spec["namespaceSelector"] == {"matchNames": ["training"]}
    labels = values["serviceMonitor"].get("labels", {})
    assert labels.items() <= monitor["metadata"]["labels"].items()
    (endpoint,) = spec["endpoints"]
    assert endpoint.pop("port") in {port["name"] for port in found["Service"]["spec"]["ports"]}
    assert endpoint.pop("path") == "/metrics"
    assert endpoint.pop("interval") == "15s"
    assert isinstance(endpoint, dict)
    return endpoint


def test_metrics_are_scraped_over_tls_with_a_token() -> None:
    assert monitor_of(MONITORED) == {
        "scheme": "https",
        "tlsConfig": {
            "ca": {"secret": {"name": "shardwell-tls", "key": "ca.crt"}},
            "serverName": "shardwell-0.shardwell.training.svc.cluster.local",
        },
        "authorization": {"type": "Bearer", "credentials": {"name": "reader", "key": "secret"}},
    }
    monitor = {
        **MONITORED["serviceMonitor"],
        "caSecret": {"name": "ca", "key": "root"},
        "serverName": "x.example",
    }
    assert monitor_of({**MONITORED, "serviceMonitor": monitor})["tlsConfig"] == {
        "ca": {"secret": {"name": "ca", "key": "root"}},
        "serverName": "x.example",
    }


def test_metrics_are_scraped_without_either_where_shards_have_neither() -> None:
    values = {"insecure": True, "serviceMonitor": {"enabled": True}}
    assert monitor_of(values) == {"scheme": "http"}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """A copy, to be changed."""
    shutil.copytree(CHART, tmp_path / "shardwell")
    return tmp_path / "shardwell"


@each_version
def test_the_dashboard_is_the_file(chart, version) -> None:
    dashboard = {"title": "Shards", "text": "{{ shard }} $1 'a' \"b\" \\ \u00b5", "panels": [1, 2]}
    for text in (json.dumps(dashboard), json.dumps(dashboard, indent=2) + "\n"):
        (chart / "files/shardwell.json").write_text(text)
        values = {**SECURED, "dashboard": {"labels": {"folder": "a", "grafana_dashboard": "0"}}}
        found = objects_of(values, chart=chart)["ConfigMap"]
        kubernetes_validate.validate(found, version, strict=True)
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert found["metadata"]["labels"]["folder"] == "a"
        assert found["data"].keys() == {"shardwell.json"}
        assert json.loads(found["data"]["shardwell.json"]) == dashboard


def test_no_dashboard_where_there_is_none_or_none_is_wanted(chart) -> None:
    file = chart / "files/shardwell.json"
    file.unlink(missing_ok=True)
    assert "ConfigMap" not in objects_of(SECURED, chart=chart)
    file.write_text("{}")
    values = {**SECURED, "dashboard": {"enabled": False}}
    assert "ConfigMap" not in objects_of(values, chart=chart)


def test_the_charts_dashboard_is_a_copy_of_deploys() -> None:
    copied = CHART / "files/shardwell.json"
    command = f"cp {DASHBOARD.relative_to(ROOT)} {copied.relative_to(ROOT)}"
    assert copied.exists() == DASHBOARD.exists(), command
    if copied.exists():
        assert copied.read_bytes() == DASHBOARD.read_bytes(), command


MONITOR_ALONE = {"serviceMonitor": {"enabled": True}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {},
            [
                "tls.existingSecret and tokens.existingSecret are not set",
                "shardwell certs certs --host shardwell-0.shardwell.training.svc.cluster.local "
                "--host shardwell-1.shardwell.training.svc.cluster.local ",
                "shardwell token create workers --right create",
                "kubectl -n training create secret generic shardwell-tls ",
                "kubectl -n training create secret generic shardwell-tokens ",
                "insecure=true",
            ],
        ),
        ({"tls": SECURED["tls"]}, ["and tokens.existingSecret is not set"]),
        ({"tokens": SECURED["tokens"]}, ["and tls.existingSecret is not set"]),
        (
            {**SECURED, "insecure": True},
            ["insecure and tokens.existingSecret are both set", "Unset one of them"],
        ),
        (
            {**SECURED, **MONITOR_ALONE},
            ["serviceMonitor.tokenSecret.name is not set", "create monitoring --right read"],
        ),
        (
            {**MONITORED, "tls": {"existingSecret": "a", "clientCaKey": ""}},
            ["set serviceMonitor.caSecret.name"],
        ),
    ],
)
def test_what_would_be_refused_later_is_refused_with_what_to_do(values, words) -> None:
    error = rendered(values)["error"]
    assert error["kind"] == "HelmRenderError"
    for each in words:
        assert each in error["message"]


REFUSED: list[tuple[Values, str]] = [
    ({"shardcount": 3}, "shardcount"),
    ({"shardCount": 0}, "shardCount"),
    ({"shardCount": 513}, "shardCount"),
    ({"shardCount": "3"}, "shardCount"),
    ({"shardCount": 1.5}, "shardCount"),
    ({"clusterId": "a b"}, "clusterId"),
    ({"tls": {"secretName": "a"}}, "secretName"),
    ({"tls": {"existingSecret": "A_B"}}, "existingSecret"),
    ({"tls": {"certKey": ""}}, "certKey"),
    ({"tls": {"keyKey": "../a"}}, "keyKey"),
    ({"insecure": "yes"}, "insecure"),
    ({"durability": "disk"}, "durability"),
    ({"durability": 0}, "durability"),
    ({"persistence": {"size": "10 GB"}}, "size"),
    ({"persistence": {"accessMode": "ReadWriteMany"}}, "accessMode"),
    ({"resources": {"requests": {"memory": None}}}, "memory"),
    ({"resources": {"requests": {"gpu": 1}}}, "gpu"),
    ({"limits": {"streams": 3}}, "streams"),
    ({"limits": {"stream_count_max": 0}}, "stream_count_max"),
    ({"limits": {"stream_count_max": "many"}}, "stream_count_max"),
    ({"logLevel": "trace"}, "logLevel"),
    ({"shutdown": {"marginS": 0}}, "marginS"),
    ({"shutdown": {"graceS": -1}}, "graceS"),
    ({"startupTimeoutS": 1}, "startupTimeoutS"),
    ({"listenHost": "127.0.0.1"}, "listenHost"),
    ({"networkPolicy": {"workerPodLabels": {"shardwell/role": None}}}, "workerPodLabels"),
    ({"networkPolicy": {"monitoringNamespaceLabels": {"a": 1}}}, "monitoringNamespaceLabels"),
    ({"serviceMonitor": {"interval": "often"}}, "interval"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"imagePullSecrets": ["a"]}, "imagePullSecrets"),
    ({"fullnameOverride": "Shards"}, "fullnameOverride"),
]


@pytest.mark.parametrize(("values", "name"), REFUSED, ids=lambda v: str(v)[:60])
def test_a_wrong_value_is_refused_by_its_name(values, name) -> None:
    merged = {**SECURED, **values}
    error = rendered(merged)["error"]
    assert error["kind"] == "HelmValuesError"
    assert name in error["message"]


def entries_of(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, entry in schema.get("properties", {}).items():
        yield f"{path}{name}", entry
        yield from entries_of(entry, f"{path}{name}.")


def test_the_schema_describes_each_value_and_knows_all() -> None:
    entries = dict(entries_of(SCHEMA))
    for path, entry in entries.items():
        assert entry["description"].endswith((".", ".)")), path
        if "properties" in entry:
            assert entry["additionalProperties"] is False, path
    assert SCHEMA["additionalProperties"] is False

    def paths_of(values: Values, prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict) and "properties" in entries[f"{prefix}{name}"]:
                yield from paths_of(value, f"{prefix}{name}.")

    optional = {path for path in entries if path.startswith("limits.")}
    optional |= {"global", "resources.requests.ephemeral-storage"}
    optional |= {"resources.limits.cpu", "resources.limits.ephemeral-storage"}
    assert entries.keys() - optional == set(paths_of(DEFAULTS))


# The example, and a cluster.


@each_version
def test_kubernetes_takes_the_job(version) -> None:
    kubernetes_validate.validate(JOB, version, strict=True)


def test_the_job_is_of_the_workers_of_the_chart() -> None:
    pod, spec = JOB["spec"]["template"]["spec"], JOB["spec"]
    settings = [worker_settings(index) for index in range(spec["completions"])]
    shard = pod_of(SECURED, namespace=JOB["metadata"]["namespace"])
    (of_worker, tag), of_shard = container_of(pod)["image"].split(":"), container_of(shard)["image"]
    assert (of_worker, of_shard) == ("shardwell-demo", f"shardwell:{tag}")
    assert {each[TARGET_VARIABLE] for each in settings} == {shard_settings(shard)[TARGET_VARIABLE]}
    ids = [each["SHARDWELL_WORKER_ID"] for each in settings]
    assert ids == ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
    assert {each["SHARDWELL_WORKER_COUNT"] for each in settings} == {str(spec["completions"])}
    by_clients = {CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, TOKEN_FILE_VARIABLE}
    named = {name for name in settings[0] if name.startswith("SHARDWELL_")}
    assert named - variables_of(train_digits) == by_clients


def start(pod: Object, settings: dict[str, str], secrets: Any, root: Path) -> dict[str, str]:
    """Lays out its volumes under a directory; its settings there."""
    lay_out(pod, secrets, root)
    return {name: re.sub(r"^/", f"{root}/", value) for name, value in settings.items()}


@dataclasses.dataclass(frozen=True)
class Shard:
    """A running one, with the settings of the chart."""

    program: Program
    settings: dict[str, str]
    address: str
    admin_port: int
    of_workers: dict[str, dict[str, bytes]]
    """Secrets that the notes' commands have made for workers."""


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    """The only one of a release."""
    tokens = {**SECURED["tokens"], "statusTokenKey": "status"}
    values = {**SECURED, "tokens": tokens, "shardCount": 1}
    secrets = secrets_of(files_of(values)["NOTES.txt"], tmp_path)
    pod = pod_of(values)
    assert container_of(pod)["args"] == ["serve"]
    port, admin_port = free_port(), free_port()
    own = {name: secrets.pop(name) for name in ("shardwell-tls", "shardwell-tokens")}
    settings = start(pod, shard_settings(pod), own, tmp_path / "shard") | {
        "SHARDWELL_LISTEN": f"0.0.0.0:{port}",
        ADMIN_VARIABLE: f"0.0.0.0:{admin_port}",
    }
    with Program("-m", "shardwell_server", "serve", environment=settings) as program:
        assert program.read_line() == f"serving on 0.0.0.0:{port}"
        yield Shard(program, settings, f"127.0.0.1:{port}", admin_port, secrets)


def test_a_cluster_with_the_settings_of_the_chart_and_the_job(shard, tmp_path) -> None:
    """One shard and one worker, from the commands of the notes to the trained model."""
    given = worker_settings(0)
    host = given[TARGET_VARIABLE].split(",")[0].rpartition(":")[0]
    settings = start(
        JOB["spec"]["template"]["spec"], given, shard.of_workers, tmp_path / "worker"
    ) | {
        TARGET_VARIABLE: shard.address,
        SERVER_NAME_VARIABLE: host,  # no resolver here knows it; the certificate must name it
        "SHARDWELL_WORKER_COUNT": "1",
        "SHARDWELL_STEPS": "200",
    }
    code, output, log = run_command("train-digits", environment=settings)
    assert code == 0, (output, log)
    data = Path(shard.settings["SHARDWELL_DATA_DIR"])
    assert data.stat().st_mode & 0o777 == 0o700
    inside = shard.settings | {TARGET_VARIABLE: shard.address}
    assert run_command("status", environment=inside)[0] == 0
    without = {name: v for name, v in settings.items() if name != TOKEN_FILE_VARIABLE}
    assert run_command("train-digits", environment=without)[0] == 1


def get(port: int, host: str, ca: Path, path: str, token: str | None) -> int:
    """The status of https://HOST:PORT/PATH on this machine; verifies that it is HOST."""
    context = ssl.create_default_context(cafile=ca)
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.makefile("rb").readline().split()[1])


def test_probes_and_prometheus_are_answered(shard) -> None:
    pod = pod_of({**MONITORED, "shardCount": 1})
    probes = [container_of(pod)[f"{name}Probe"] for name in ("startup", "liveness", "readiness")]
    monitor = monitor_of({**MONITORED, "shardCount": 1})
    host, ca = monitor["tlsConfig"]["serverName"], Path(shard.settings[CA_VARIABLE])
    token = shard.of_workers["shardwell-worker-token"]["token"].decode().strip()
    for probe in probes:
        assert get(shard.admin_port, host, ca, probe["httpGet"]["path"], None) == 200
    assert get(shard.admin_port, host, ca, "/metrics", token) == 200
    assert get(shard.admin_port, host, ca, "/metrics", None) == 401
