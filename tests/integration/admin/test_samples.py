"""Goal: the account of samples is the same wherever it is shown, and only who may read it sees it.

Method: an elastic member leases batches of two datasets, and the gradients of two count; each view
is compared with what was done.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import shardwell
from harness.polling import PATIENCE_S
from harness.programs.commands import run_command
from harness.tokens import Tokens

LENGTH = 50
SAMPLES = shardwell.Samples(LENGTH, 4, shuffle=False)
OPERATIONS = Path(__file__).parents[3] / "docs/operations.md"


class Watched:
    """A cluster in which 8 samples have counted, and 40 more are leased."""

    def __init__(self, cluster: Any, connect: Any, path: Path) -> None:
        self.tokens = Tokens(path)
        self.token_file = self.tokens.add("all", "create")
        self.running = cluster(2, tokens=self.tokens.path, admin_listen="127.0.0.1:0")
        client = connect(self.running, "w0", token_file=self.token_file)
        self.net = client.parameter(
            "net", size=3, optimizer=shardwell.SGD(lr=0.5), members=shardwell.Elastic()
        )
        self.net.init(np.zeros(3))
        batches = self.net.batches(SAMPLES, epochs=2)
        for _ in range(2):
            self.net.exchange(np.ones(3), batch=next(batches))

    def read(self, path: str, token_file: Path) -> str:
        request = urllib.request.Request(
            self.running.admin_urls[0] + path,
            headers={"Authorization": f"Bearer {token_file.read_text().strip()}"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            found: str = answer.read().decode()
            return found

    def shown(self, command: str, *options: str) -> list[str]:
        code, output, log = run_command(
            command,
            *options,
            f"--shards={self.running.target}",
            environment={"COLUMNS": "200", "SHARDWELL_TOKEN_FILE": str(self.token_file)},
        )
        assert code == 0, output + log
        return output.splitlines()


@pytest.fixture
def watched(cluster: Any, connect: Any, tmp_path: Path) -> Watched:
    return Watched(cluster, connect, tmp_path)


def test_a_parameter_says_how_its_samples_stand(watched: Watched) -> None:
    found = watched.net.samples["train"]
    assert found == shardwell.SamplesStatus(
        name="train",
        length=LENGTH,
        epoch=0,
        done_count=8,
        out_count=40,
        free_count=2,
        left_out_count=0,
        partial_count=0,
        partial=(),
    )


def test_a_parameter_has_no_account_before_samples_are_dealt(cluster: Any, connect: Any) -> None:
    client = connect(cluster(2), "w0")
    net = client.parameter("net", size=3, optimizer=shardwell.SGD(lr=0.5))
    assert net.samples == {}


def test_status_and_top_have_a_line_for_each_dataset(watched: Watched) -> None:
    for command in (["status"], ["status", "--by-shard"], ["top", "--once", "--interval-s=0.1"]):
        (line,) = [line for line in watched.shown(*command) if " train " in line]
        assert line.split() == ["net", "train", "0", "8", "of", "50", "40", "2", "0", "0"]


def test_json_has_the_account_on_shard_0(watched: Watched) -> None:
    accounts = [
        json.loads(line)["parameters"][0]["samples"] for line in watched.shown("status", "--json")
    ]
    account = dict(vars(watched.net.samples["train"]))
    assert accounts == [[account | {"partial": []}], []]


def test_the_page_shows_it_to_tokens_that_may_read_the_name(watched: Watched) -> None:
    assert "sample-part" in watched.read("", watched.token_file)
    found = json.loads(watched.read("status.json", watched.token_file))
    (account,) = found["parameters"][0]["samples"]
    assert (account["name"], account["done_count"], account["out_count"]) == ("train", 8, 40)
    other = watched.tokens.add("other", "read:other")
    for path in ("status.json", "metrics"):
        assert '"train"' not in watched.read(path, other), path


def test_metrics_have_each_state_and_the_docs_name_them(watched: Watched) -> None:
    told = {
        (sample.name, sample.labels.get("state", "")): sample
        for family in text_string_to_metric_families(watched.read("metrics", watched.token_file))
        for sample in family.samples
        if sample.name.startswith("shardwell_samples") and not sample.name.endswith("_created")
    }
    assert {key: sample.value for key, sample in told.items()} == {
        ("shardwell_samples_epoch", ""): 0,
        ("shardwell_samples", "done"): 8,
        ("shardwell_samples", "out"): 40,
        ("shardwell_samples", "free"): 2,
        ("shardwell_samples_left_out_total", ""): 0,
        ("shardwell_samples_partial_total", ""): 0,
    }
    page = OPERATIONS.read_text()
    for (name, _), sample in told.items():
        assert f"`{name}`" in page
        labels = {name: value for name, value in sample.labels.items() if name != "state"}
        assert labels == {"kind": "parameter", "name": "net", "dataset": "train"}
