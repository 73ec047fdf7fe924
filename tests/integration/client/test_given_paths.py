"""Goal: whatever takes a path refuses URLs by name, makes nothing, and knows the user's home.

Method: all verbs and commands that take one, in a working directory that stays empty.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.programs.commands import run_command
from shardwell_server import LocalCluster, MmapGradientAccumulator

SGD = shardwell.SGD(learning_rate=1.0)
URL = "ftp://bucket/run"


@pytest.fixture
def client(cluster, connect) -> shardwell.Client:
    client = connect(cluster(1), "w0")
    client.parameter("net", size=4, optimizer=SGD).init(np.zeros(4))
    client.table("rows", row_count=4, dim=2, optimizer=SGD).put_row_gradients(
        [1], np.ones((1, 2), np.float32)
    )
    return client


VERBS: dict[str, Callable[[shardwell.Client, str], object]] = {
    "save": lambda client, url: client.save_checkpoint(url),
    "save steps": lambda client, url: client.save_checkpoint(f"{url}/{{step}}", keep=1),
    "restore": lambda client, url: client.restore_checkpoint(url),
    "export a table": lambda client, url: client.export_table("rows", f"{url}.safetensors"),
    "inspect": lambda _, url: shardwell.inspect_checkpoint(url),
    "export": lambda _, url: shardwell.export_checkpoint("here", f"{url}.safetensors"),
    "data_dir": lambda _, url: LocalCluster(1, data_dir=url),
    "audit_dir": lambda _, url: LocalCluster(1, audit_dir=url),
    "accumulator": lambda _, url: MmapGradientAccumulator(url, 2, 2),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_url_is_refused_by_name(client, tmp_path, monkeypatch, verb) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(shardwell.ArgumentError, match=r"'ftp://bucket/run.*' is a URL of 'ftp'"):
        VERBS[verb](client, URL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("cluster", "--shard-count=1", f"--data-dir={URL}"),
        ("serve", "--shard-index=0", "--shard-count=1", f"--data-dir={URL}"),
        ("checkpoint", "save", URL, "--shards=127.0.0.1:1"),
        ("certs", URL),
        ("trace", URL, "--shards=127.0.0.1:1"),
    ],
)
def test_commands_refuse_urls_as_paths(tmp_path, monkeypatch, arguments) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, log = run_command(*arguments)
    assert code == 2
    assert "is a URL of 'ftp'; expected a local path" in " ".join(log.replace("│", "").split())
    assert not list(tmp_path.iterdir())


def test_the_home_of_the_user(client, tmp_path, monkeypatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    made = client.save_checkpoint("~/ckpt/{step}")
    assert made.path.parent == home / "ckpt"
    assert shardwell.inspect_checkpoint("~/ckpt/{step}").path == made.path
    client.export_table("rows", "~/rows.safetensors")
    with LocalCluster(1, data_dir="~/data"):
        pass
    assert {path.name for path in home.iterdir()} == {"ckpt", "rows.safetensors", "data"}
    code, _, log = run_command("certs", "~/certs", environment={"HOME": str(home)})
    assert code == 0, log
    assert (home / "certs" / "ca.pem").is_file()
    assert not list(Path(here).iterdir())
