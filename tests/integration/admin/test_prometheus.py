"""Goal: each expression of the dashboard and of the alert rules returns what it should.

Method: a real Prometheus scrapes a real cluster of two shards while one worker waits for another,
and is asked for every expression that is committed; rules fire where they should, by Prometheus'
own rule tests, and nowhere else.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.required import program

DEPLOY = Path(__file__).parents[3] / "deploy"
RUNBOOK = DEPLOY.parent / "docs" / "runbook.md"
RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "shardwell.json"
SGD = shardwell.SGD(learning_rate=0.5)
ONES = np.ones(10, np.float32)


def expressions() -> dict[str, str]:
    """Those of the dashboard, by title, with its variable put in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        panel["title"]: target["expr"].replace("$job", "shardwell")
        for panel in panels
        for target in panel["targets"]
    }


def rules() -> dict[str, str]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


class Prometheus:
    """A server that scrapes some addresses each second."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[Any]:
        asked = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{asked}", timeout=20) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success", expression
        return found["data"]["result"]


@pytest.fixture
def prometheus(tmp_path: Path) -> Any:
    """Starts one that scrapes addresses."""
    program("prometheus")
    processes = []

    def start(addresses: list[str]) -> Prometheus:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": "shardwell", "static_configs": [{"targets": addresses}]}
            ],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={tmp_path / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        processes.append(subprocess.Popen(command))
        return Prometheus(f"http://127.0.0.1:{port}")

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_every_alert_and_panel_finds_its_metrics(cluster, connect, prometheus, tmp_path) -> None:
    running = cluster(2, tokens=None, admin_listen="127.0.0.1:0", data_dir=tmp_path / "shards")
    nets = [
        connect(running, f"w{rank}").parameter("net", size=10, optimizer=SGD, worker_count=2)
        for rank in range(2)
    ]
    nets[0].init(np.zeros(10, np.float32))
    addresses = [url.removeprefix("http://").strip("/") for url in running.admin_urls]
    server = prometheus(addresses)

    def is_up() -> bool:
        try:
            return len(server.query("up == 1")) == 2
        except OSError:
            return False

    eventually("it scrapes", is_up)
    with pytest.raises(shardwell.ArgumentError):
        nets[0].exchange(np.ones(9, np.float32))
    with pytest.raises(shardwell.SpecMismatchError):
        connect(running, "w2").parameter("net", size=9, optimizer=SGD)
    options = {"sync_every": 2, "fragments": 1, "members": shardwell.Elastic(max_count=2)}
    weights = {"bias": np.zeros(4, np.float32)}
    learner = shardwell.Outer(
        connect(running, "learner"), "outer", tensors={"bias": (4,)}, **options
    )
    learner.init(weights)
    until_s = time.monotonic() + 8
    while time.monotonic() < until_s:  # over some scrapes
        for net in nets:
            net.put_gradient(ONES)
        weights.update(learner.after_step(weights))
    nets[0].put_gradient(ONES)  # and waits
    eventually("it is told", lambda: server.query("shardwell_step_open_seconds > 1"))
    for title, expression in expressions().items():
        found = eventually(title, lambda expression=expression: server.query(expression))
        values = [float(each["value"][1]) for each in found]
        assert all(value >= 0 for value in values), title
    (waited,) = server.query(expressions()["Whom everybody waits for"])
    assert waited["metric"]["worker"] == "w1"
    assert waited["metric"]["host"] == socket.gethostname()
    assert len(server.query(expressions()["Payload"])) == 4
    members = server.query(expressions()["Members, by state"])
    assert {each["metric"]["name"] for each in members} == {"outer.fragment-0"}
    assert sum(float(each["value"][1]) for each in members) == 1
    learner.leave()
    assert {each["metric"]["reason"] for each in server.query(expressions()["Calls refused"])} == {
        "SpecMismatchError"
    }
    found = rules()
    stalled = found["ShardwellStepStalled"].replace("> 60", "> 1")
    (told,) = eventually("it stalls", lambda: server.query(stalled))
    assert told["metric"] == {"cluster": running.cluster_id, "kind": "parameter", "name": "net"}
    (told,) = server.query(found["ShardwellWorkerMissing"])
    assert told["metric"]["worker"] == "w1"
    assert server.query(found["ShardwellVersionsApart"].replace("> 1", "== 1"))
    for quiet in ("Down", "Restarting", "LimitNear", "VersionsApart", "Damaged", "FilesGone"):
        (name,) = [each for each in found if each.endswith(quiet)]
        assert server.query(found[name]) == [], name
    server.query(found["ShardwellDiskFilling"])  # other programs may fill the machine's disk


def series(metric: str, values: str, **labels: str) -> dict[str, str]:
    told = {"job": "shardwell", "instance": "a", **labels}
    spelled = ",".join(f'{label}="{value}"' for label, value in told.items())
    return {"series": f"{metric}{{{spelled}}}", "values": values}


INFO = series("shardwell_shard_info", "1x60", cluster="c", shard_index="0")
NET = {"kind": "parameter", "name": "net"}
CASES: dict[str, list[dict[str, str]]] = {
    "ShardwellStepStalled": [INFO, series("shardwell_step_open_seconds", "0+30x60", **NET)],
    "ShardwellWorkerMissing": [
        INFO,
        series("shardwell_step_waits_for", "1x60", worker="w1", host="h", **NET),
    ],
    "ShardwellAbandoned": [INFO, series("shardwell_abandoned_seconds", "0+30x60", **NET)],
    "ShardwellShardDown": [series("up", "0x60")],
    "ShardwellShardRestarting": [series("process_start_time_seconds", "1+60x60")],
    "ShardwellDiskFilling": [
        series("shardwell_disk_free_bytes", "1e9-1e7x60"),
        series("shardwell_disk_size_bytes", "4e9x60"),
    ],
    "ShardwellLimitNear": [
        series("shardwell_streams", "95x60"),
        series("shardwell_streams_limit", "100x60"),
    ],
    "ShardwellDamaged": [series("shardwell_damaged", "1x60")],
    "ShardwellFilesGone": [series("shardwell_files_gone", "1x60")],
    "ShardwellEndsSoon": [
        series("shardwell_ends_seconds", "2e6x60", kind="certificate", name="server.pem"),
        series("shardwell_ends_soon", "1x60", kind="certificate", name="server.pem"),
        series("shardwell_ends_seconds", "9e6x60", kind="authority", name="ca.pem"),
        series("shardwell_ends_soon", "0x60", kind="authority", name="ca.pem"),
    ],
    "ShardwellEndsTomorrow": [
        series("shardwell_ends_seconds", "3600-60x70", kind="token", name="trainer"),
        series("shardwell_ends_soon", "1x70", kind="token", name="trainer"),
        series("shardwell_ends_seconds", "6e4x70", kind="certificate", name="of-a-day.pem"),
        series("shardwell_ends_soon", "0x70", kind="certificate", name="of-a-day.pem"),
    ],
    "ShardwellVersionsApart": [
        INFO,
        series("shardwell_shard_info", "1x60", cluster="c", shard_index="1", instance="b"),
        series("shardwell_build_info", "1x60", version="1"),
        series("shardwell_build_info", "1x60", version="2", instance="b"),
    ],
}


def test_each_rule_names_a_section_of_the_runbook() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    headings = re.findall(r"^#+ (.+)$", RUNBOOK.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings}
    for rule in group["rules"]:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/runbook.md", rule["alert"]
        assert anchor in anchors, rule["alert"]


def test_each_rule_has_a_case() -> None:
    assert set(CASES) == set(rules())


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires(name: str, tmp_path: Path) -> None:
    """And none of the others does."""
    program("promtool")
    shutil.copy(RULES, tmp_path / "alerts.yml")
    fires = {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": CASES[name],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "50m",
                        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1}],
                    }
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(fires))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
