"""Goal: `docker compose up` lets nobody in but its own, and each container has only what it needs.

Method: docker-compose.yml is read as Compose reads it. The script of its service `credentials` runs
in directories that stand for the volumes, and real shards and workers with the settings of the
file. What an engine does with it is not tried here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import yaml
from cryptography import x509

import shardwell
from harness.programs.commands import Program, run_command
from harness.programs.ports import free_port
from shardwell.client import TARGET_VARIABLE
from shardwell.rpc.credentials import TOKEN_FILE_VARIABLE
from shardwell.rpc.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from shardwell_server.cli.serve import serve
from shardwell_server.cli.status import status
from shardwell_server.cli.train_digits import train_digits

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
SCRIPT = ROOT / "deploy/compose-credentials"
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
SHARDS = sorted(name for name in SERVICES if name.startswith("shard-"))
WORKERS = sorted(name for name in SERVICES if name.startswith("worker-"))
BY_CLIENTS = {CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, TOKEN_FILE_VARIABLE}
"""Variables that whatever calls a shard reads."""
OF_SHARDS = ["ca.pem", "server.key", "server.pem", "status.token", "tokens.json"]
OF_WORKERS = ["ca.pem", "client.key", "client.pem", "workers.token"]


def settings_of(service: str) -> dict[str, str]:
    """Its environment, where the shell sets nothing."""
    given: Mapping[str, str] = SERVICES[service]["environment"]
    return {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for name, value in given.items()}


def mounts_of(service: str) -> dict[str, tuple[str, bool]]:
    """The volume at each directory, and whether it can be written."""
    found = (volume.split(":") for volume in SERVICES[service]["volumes"])
    return {directory: (name, "ro" not in mode) for name, directory, *mode in found}


def variables_of(command: click.Command) -> set[str]:
    names = [option.envvar or [] for option in command.params]
    return set(itertools.chain.from_iterable([n] if isinstance(n, str) else n for n in names))


def test_three_shards_and_four_workers() -> None:
    assert sorted(SERVICES) == sorted(["credentials", *SHARDS, *WORKERS])
    assert (len(SHARDS), len(WORKERS)) == (3, 4)
    target = ",".join(f"{name}:7070" for name in SHARDS)
    assert {settings_of(name)[TARGET_VARIABLE] for name in (*SHARDS, *WORKERS)} == {target}
    assert settings_of("credentials") == {"HOSTS": " ".join(SHARDS)}


@pytest.mark.parametrize(
    ("services", "commands"), [(SHARDS, (serve, status)), (WORKERS, (train_digits,))]
)
def test_each_variable_is_one_that_the_command_reads(services, commands) -> None:
    read = BY_CLIENTS.union(*map(variables_of, commands))
    for service in services:
        names = {name for name in settings_of(service) if name.startswith("SHARDWELL_")}
        assert names - read == set()


def test_shards_speak_tls_and_ask_for_tokens() -> None:
    for service in SHARDS:
        settings = settings_of(service)
        assert {*BY_CLIENTS, "SHARDWELL_TOKENS"} <= settings.keys()
        assert "SHARDWELL_INSECURE" not in settings
    for service in WORKERS:
        assert settings_of(service).keys() >= BY_CLIENTS


def test_health_is_asked_where_a_certificate_names_it() -> None:
    for service in SHARDS:
        asked = SERVICES[service]["healthcheck"]["test"]
        assert asked == ["CMD", "shardwell", "health", "127.0.0.1:7070"]


def test_no_container_has_what_it_does_not_need() -> None:
    for service in SERVICES:
        own = {
            "credentials": {
                "/credentials/authority": ("authority", True),
                "/credentials/shards": ("shard-credentials", True),
                "/credentials/workers": ("worker-credentials", True),
            },
            "shard": {
                "/credentials/shards": ("shard-credentials", False),
                "/data": (service, True),
                "/run/shardwell": ("same-host", True),
            },
            "worker": {
                "/credentials/workers": ("worker-credentials", False),
                "/run/shardwell": ("same-host", True),
            },
        }
        assert mounts_of(service) == own[service.partition("-")[0]]
        assert not {"ports", "user", "privileged", "cap_add", "pid"} & SERVICES[service].keys()
    assert SERVICES["credentials"]["network_mode"] == "none"


def test_nobody_starts_before_there_are_credentials() -> None:
    for service in (*SHARDS, *WORKERS):
        condition = SERVICES[service]["depends_on"]["credentials"]["condition"]
        assert condition == "service_completed_successfully"
    assert "restart" not in SERVICES["credentials"]


def test_the_image_has_the_script_and_directories_that_its_user_owns() -> None:
    lines = re.findall(r"install -d -o shardwell -g shardwell ([^\n\\&]*)", DOCKERFILE)
    owned = {word for line in lines for word in line.split() if word.startswith("/")}
    assert owned == set().union(*map(mounts_of, SERVICES))
    users = re.findall(r"^USER (\S+)", DOCKERFILE, re.M)
    assert users[-1] == "shardwell"
    assert f"COPY {SCRIPT.relative_to(ROOT)} /usr/local/bin/" in DOCKERFILE
    assert f"!{SCRIPT.relative_to(ROOT)}" in (ROOT / ".dockerignore").read_text().splitlines()
    assert SERVICES["credentials"]["entrypoint"] == [SCRIPT.name]
    assert os.access(SCRIPT, os.X_OK)


Credentials = Callable[..., subprocess.CompletedProcess[str]]
WHEN_KILLED = -9


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    """Runs the script; with killed_after, it is killed once so many commands have ended."""
    for name in ("authority", "shards", "workers", "bin"):
        (tmp_path / name).mkdir()
    command = tmp_path / "bin/shardwell"
    command.write_text(
        f'#!/bin/sh\n"{sys.executable}" -m shardwell_server "$@" || exit\n'
        'echo "$@" >>../commands\n'
        '[ "$(wc -l <../commands)" != "$KILLED_AFTER" ] || kill -9 $PPID\n'
    )
    command.chmod(0o755)

    def run(
        *arguments: str, killed_after: int = 0, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "commands").write_text("")
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SHARDWELL_")}
        kept |= {"PATH": f"{command.parent}:{kept['PATH']}", "KILLED_AFTER": str(killed_after)}
        return subprocess.run(
            ["/bin/sh", SCRIPT, *arguments],
            cwd=tmp_path / "authority",
            env=kept | settings_of("credentials") | settings,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def check_complete(tmp_path: Path) -> None:
    """Shards and workers have what they need and no more, and it fits together."""
    authority, shards, workers = (tmp_path / n for n in ("authority", "shards", "workers"))
    assert [*contents(shards)] == OF_SHARDS
    assert [*contents(workers)] == OF_WORKERS
    made = contents(authority)
    assert made == made | contents(shards) | contents(workers)
    entries = {entry["name"]: entry for entry in json.loads(made["tokens.json"])["tokens"]}
    assert {name: entry["rights"] for name, entry in entries.items()} == {
        "status": ["read"],
        "workers": ["create:digits"],
    }
    for name, entry in entries.items():
        secret = made[f"{name}.token"].strip()
        assert hashlib.sha256(secret).hexdigest() == entry["sha256"][-1]
    for path in tmp_path.glob("*/*"):
        if path.suffix in (".key", ".token", ".json"):
            assert path.stat().st_mode & 0o777 == 0o600


def test_the_first_start_makes_all_and_later_ones_nothing(credentials, tmp_path) -> None:
    assert credentials().returncode == 0
    check_complete(tmp_path)
    before = {path: path.stat() for path in tmp_path.glob("[asw]*/*")}
    again = credentials()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert (tmp_path / "commands").read_text() == ""
    assert {path: path.stat().st_ino for path in before} == {
        path: path.stat().st_ino for path in tmp_path.glob("[asw]*/*")
    }


@pytest.mark.parametrize("killed_after", [1, 2, 3])
def test_a_start_that_was_broken_off_is_made_good(credentials, tmp_path, killed_after) -> None:
    assert credentials(killed_after=killed_after).returncode == WHEN_KILLED
    assert credentials().returncode == 0
    check_complete(tmp_path)


def test_a_secret_whose_entry_was_not_written_is_made_anew(credentials, tmp_path) -> None:
    assert credentials(killed_after=3).returncode == WHEN_KILLED
    (tmp_path / "authority/tokens.json").unlink()
    assert credentials().returncode == 0
    check_complete(tmp_path)


def test_what_is_renewed_reaches_shards_and_workers(credentials, tmp_path) -> None:
    credentials()
    shards, workers = contents(tmp_path / "shards"), contents(tmp_path / "workers")
    for arguments in (("certs", "."), ("token", "renew", "workers")):
        assert credentials(*arguments).returncode == 0
    check_complete(tmp_path)
    new = {**contents(tmp_path / "shards"), **contents(tmp_path / "workers")}
    changed = {name for name, old in {**shards, **workers}.items() if new[name] != old}
    assert changed == {*OF_SHARDS, *OF_WORKERS} - {"ca.pem", "status.token"}


def test_other_names_of_shards_are_new_certificates_and_the_same_tokens(
    credentials, tmp_path
) -> None:
    credentials()
    old = contents(tmp_path / "shards")
    assert credentials(HOSTS="shard-0 here.example").returncode == 0
    check_complete(tmp_path)
    new = contents(tmp_path / "shards")
    assert [name for name in new if new[name] != old[name]] == ["server.key", "server.pem"]
    found = x509.load_pem_x509_certificate(new["server.pem"]).extensions
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["shard-0", "here.example", "localhost"]


def test_a_token_that_was_revoked_is_another_at_the_next_start(credentials, tmp_path) -> None:
    credentials()
    old = (tmp_path / "workers/workers.token").read_text()
    assert credentials("token", "revoke", "workers").returncode == 0
    assert '"workers"' not in (tmp_path / "shards/tokens.json").read_text()
    assert credentials().returncode == 0
    check_complete(tmp_path)
    assert (tmp_path / "workers/workers.token").read_text() != old


def test_a_command_that_fails_fails(credentials) -> None:
    assert credentials("token", "revoke", "nobody").returncode == 1


def test_a_cluster_with_the_settings_of_the_file(credentials, tmp_path) -> None:
    """One shard and one worker, from the script to the trained model."""
    credentials()
    shutil.rmtree(tmp_path / "authority")
    address = f"127.0.0.1:{free_port()}"
    here = {TARGET_VARIABLE: address}

    def with_files_here(service: str) -> dict[str, str]:
        given = settings_of(service)
        return {k: v.replace("/credentials/", f"{tmp_path}/") for k, v in given.items()} | here

    (tmp_path / "sockets").mkdir()
    of_shard = with_files_here(SHARDS[0]) | {
        "SHARDWELL_SHARD_COUNT": "1",
        "SHARDWELL_LISTEN": address.replace("127.0.0.1", "0.0.0.0"),
        "SHARDWELL_DATA_DIR": f"{tmp_path}/data",
        "SHARDWELL_SAME_HOST": f"{tmp_path}/sockets",
    }
    of_worker = with_files_here(WORKERS[0]) | {"SHARDWELL_WORKER_COUNT": "1"}
    with Program("-m", "shardwell_server", "serve", environment=of_shard) as shard:
        assert shard.read_line() == f"serving on {of_shard['SHARDWELL_LISTEN']}"
        assert run_command("health", address, environment=of_shard)[0] == 0
        code, output, log = run_command("train-digits", environment=of_worker)
        assert code == 0, (output, log)
        assert run_command("status", environment=of_shard)[0] == 0
        code, output, _ = run_command("status", environment=here | {"COLUMNS": "300"})
        assert (code, "speaks TLS" in output) == (1, True)

        for given, name, words in (
            (of_worker, "model", "token 'workers' has no right to parameter 'model'"),
            (of_shard, "digits-2", "token 'status' may read parameter 'digits-2', not create"),
        ):
            ca, cert, key = (given[n] for n in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE))
            with (
                shardwell.connect(
                    address,
                    worker_id="w0",
                    tls=shardwell.Tls(ca=ca, cert=cert, key=key),
                    token_file=given[TOKEN_FILE_VARIABLE],
                ) as client,
                pytest.raises(shardwell.AccessDeniedError, match=words),
            ):
                client.parameter(name, size=3, optimizer=shardwell.SGD(1.0)).init(np.zeros(3))
