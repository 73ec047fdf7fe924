"""Goal: an operator hears of certificates and tokens before they end, wherever an operator looks.

Method: a real shard with files that end soon, its log, status, metrics and command.
"""

from __future__ import annotations

import datetime
import ssl
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import shardwell
from harness.certificates import authority, write_pair
from harness.polling import PATIENCE_S, eventually
from harness.tokens import Tokens
from shardwell import Tls
from shardwell_server import ShardConfig, ShardServer
from shardwell_server.access.ends import DAY_S


@pytest.mark.parametrize("own_end", [5, 300])
def test_what_ends_soon_is_told(tmp_path: Path, caplog, own_end: int) -> None:
    files, tokens = authority(), Tokens(tmp_path)
    for name, days in (("server", own_end), ("worker", 0.5)):
        pair = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        write_pair("P-256", *pair, files, days, age_days=100)
    now = datetime.datetime.now(datetime.UTC)  # noqa: TID251 (tokens end by it)
    in_20_days = (now + datetime.timedelta(days=20)).isoformat()
    token = tokens.add("trainer", "create", expires=in_20_days)
    config = ShardConfig(
        shard_index=0,
        shard_count=1,
        tokens=tokens.path,
        tls=Tls(ca=files.ca, cert=tmp_path / "server.pem", key=tmp_path / "server.key"),
        admin_listen="127.0.0.1:0",
    )
    tls = Tls(ca=files.ca, cert=tmp_path / "worker.pem", key=tmp_path / "worker.key")
    with (
        ShardServer(config) as server,
        shardwell.connect(server.address, worker_id="w0", tls=tls, token_file=token) as client,
    ):
        client.parameter("net", size=8, optimizer=shardwell.SGD(learning_rate=1.0))
        wanted = ["certificate of worker w0 ends in 0.5", "token trainer ends in 20.0"]
        if own_end == 5:
            wanted.insert(1, f"certificate {tmp_path}/server.pem ends in 5.0")

        def told() -> list[str]:
            (status,) = client.status()
            return [each.words.split(" days")[0] for each in status.troubles]

        eventually("all are told", lambda: told() == wanted)
        (status,) = client.status()
        sections = {each.section for each in status.troubles}
        assert sections == {"a-token-or-certificate-has-expired"}
        in_log = [record.message for record in caplog.records if " ends in " in record.message]
        assert any(each.startswith("token trainer ends in 20.0 days") for each in in_log)
        assert any("server.pem" in each for each in in_log) == (own_end == 5)
        assert server.admin is not None
        request = urllib.request.Request(
            server.admin.url + "metrics",
            headers={"Authorization": f"Bearer {token.read_text().strip()}"},
        )
        context = ssl.create_default_context(cafile=str(files.ca))
        with urllib.request.urlopen(request, timeout=PATIENCE_S, context=context) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        left = {
            sample.labels["kind"]: sample.value / DAY_S
            for family in families
            for sample in family.samples
            if sample.name == "shardwell_ends_seconds"
        }
        assert left["certificate"] == pytest.approx(own_end, abs=0.1)
        assert left["certificate of worker"] == pytest.approx(0.5, abs=0.1)
        assert left["token"] == pytest.approx(20, abs=0.1)
        assert 3000 < left["authority"] < 3660
