"""Goal: `docker compose up` lets in its own containers alone, and each has only what it needs.

Method: docker-compose.yml is read as Compose reads it. The script of its service `credentials` runs
in directories that stand for the volumes, and real shards and workers with the settings of the
file; the program of its service `ports` leads to them. The Dockerfile is read by its stages. What
an engine does with both is test_compose_containers.py's.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import yaml
from cryptography import x509

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import Program, run_command
from harness.programs.ports import free_port
from shardwell.client import TARGET_VARIABLE
from shardwell.connection.credentials import TOKEN_FILE_VARIABLE
from shardwell.connection.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from shardwell_server.cli.digits import train_digits
from shardwell_server.cli.serve import serve
from shardwell_server.cli.status import status

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPT = ROOT / "deploy/compose-credentials"
FORWARDER = ROOT / "deploy/compose_ports.py"
CONNECTION_COUNT_MAX = 256
"""Of the service `ports`."""
USER = "10001:10001"
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
SHARDS = sorted(name for name in SERVICES if name.startswith("shard-"))
WORKERS = sorted(name for name in SERVICES if name.startswith("worker-"))
BY_CLIENTS = {CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, TOKEN_FILE_VARIABLE}
"""Variables that whatever calls a shard reads."""
OF_SHARDS = ["ca.pem", "server.key", "server.pem", "status.token", "tokens.json"]
OF_WORKERS = ["ca.pem", "client.key", "client.pem", "workers.token"]
IMAGES = {"shard": "shardwell", "worker": "shardwell-demo"}
"""By kind of service; `shardwell` where there is none."""
each_service = pytest.mark.parametrize("service", SERVICES)


def in_shell(value: str) -> str:
    """A value of the file, where the shell sets nothing."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)


def settings_of(service: str) -> dict[str, str]:
    """Its environment, where the shell sets nothing."""
    given: Mapping[str, str] = SERVICES[service].get("environment", {})
    return {name: in_shell(value) for name, value in given.items()}


def mounts_of(service: str) -> dict[str, tuple[str, bool]]:
    """The volume at each directory, and whether it can be written."""
    found = (volume.split(":") for volume in SERVICES[service].get("volumes", ()))
    return {directory: (name, "ro" not in mode) for name, directory, *mode in found}


def variables_of(command: click.Command) -> set[str]:
    names = [option.envvar or [] for option in command.params]
    return set(itertools.chain.from_iterable([n] if isinstance(n, str) else n for n in names))


def test_three_shards_and_four_workers() -> None:
    assert sorted(SERVICES) == sorted(["credentials", "ports", *SHARDS, *WORKERS])
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


def test_health_is_asked_of_shards_alone_as_the_image_does() -> None:
    for service in SERVICES:
        asked = {"disable": True} if service in ("credentials", "ports") else None
        assert SERVICES[service].get("healthcheck") == asked
    (check,) = re.findall(r"HEALTHCHECK .*?CMD (.*)", stages()["shardwell"], re.S)
    assert check.splitlines()[0] == 'shardwell health "${SHARDWELL_LISTEN:-127.0.0.1:7070}"'
    assert all("HEALTHCHECK" not in text for name, text in stages().items() if name != "shardwell")


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
            "ports": {},
        }
        assert mounts_of(service) == own[service.partition("-")[0]]
        forbidden = {"user", "privileged", "cap_add", "devices", "pid", "ipc", "userns_mode"}
        assert not forbidden & SERVICES[service].keys()
    assert SERVICES["credentials"]["network_mode"] == "none"
    assert settings_of("ports") == {}


@each_service
def test_a_container_can_write_to_its_volumes_and_tmp_alone(service) -> None:
    assert SERVICES[service]["read_only"] is True
    assert [each.partition(":")[0] for each in SERVICES[service]["tmpfs"]] == ["/tmp"]


@each_service
def test_a_container_has_no_capability_and_gets_none(service) -> None:
    assert SERVICES[service]["cap_drop"] == ["ALL"]
    assert SERVICES[service]["security_opt"] == ["no-new-privileges:true"]


@each_service
def test_memory_processes_and_logs_are_limited(service) -> None:
    given = SERVICES[service]
    assert re.fullmatch(r"\d+m", in_shell(given["mem_limit"]))
    assert given["memswap_limit"] == given["mem_limit"]
    assert 80 < given["pids_limit"] <= 1024  # a shard may have 80 threads
    assert given["logging"]["driver"] == "json-file"
    assert given["logging"]["options"].keys() == {"max-size", "max-file"}
    kind = service.partition("-")[0]
    is_changeable = given["mem_limit"].startswith(f"${{SHARDWELL_{kind.upper()}_MEMORY:-")
    assert is_changeable == (kind in ("shard", "worker"))


def test_memory_of_a_shard_is_three_times_its_weights_and_100_mb() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    weights_mb, elements_millions = re.search(
        r"(\d+) MB of weights a shard, (\d+) million elements on three", text
    ).groups()
    limit_mb = int(in_shell(SERVICES[SHARDS[0]]["mem_limit"]).removesuffix("m")) * 2**20 / 1e6
    assert 0 <= limit_mb - (3 * int(weights_mb) + 100) < 60
    assert 4 * int(elements_millions) / len(SHARDS) == pytest.approx(int(weights_mb), rel=0.05)


def test_the_page_has_each_variable_that_can_be_set_with_its_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    page = (ROOT / "docs/compose.md").read_text()
    rows = re.findall(r"^\| `(SHARDWELL_\w+)` \| (?:none|`([^`]*)`) \|", page, re.M)
    assert sorted(rows) == sorted({*re.findall(r"\$\{(\w+):-(.*?)\}", text)})


@each_service
def test_each_service_has_the_image_of_its_kind(service) -> None:
    image = IMAGES.get(service.partition("-")[0], "shardwell")
    assert SERVICES[service]["image"] == image
    build = SERVICES[service]["build"]
    assert (build["dockerfile"], build["target"]) == ("deploy/Dockerfile", image)
    default = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE, re.M)[1]
    assert in_shell(build["args"]["BASE"]) == default
    assert build["args"]["BASE"] != default


def test_ports_are_published_to_this_machine_by_their_profile() -> None:
    for service in SERVICES:
        assert SERVICES[service].get("profiles", []) == (["ports"] if service == "ports" else [])
        assert ("ports" in SERVICES[service]) == (service == "ports")
        assert "network_mode" not in SERVICES[service] or service == "credentials"
    published = []
    for mapping in SERVICES["ports"]["ports"]:
        host, ports, inside = mapping.split(":")
        assert (host, ports) == ("127.0.0.1", inside)
        first, _, last = ports.partition("-")
        published += range(int(first), int(last) + 1)
    routes = dict(route.split("=") for route in SERVICES["ports"]["command"])
    assert [*map(int, routes)] == published
    listens = [
        f"{name}:{settings_of(name)[variable].rpartition(':')[2]}"
        for variable in ("SHARDWELL_LISTEN", "SHARDWELL_ADMIN_LISTEN")
        for name in SHARDS
    ]
    assert [*routes.values()] == listens


def test_no_service_starts_before_there_are_credentials() -> None:
    for service in (*SHARDS, *WORKERS):
        condition = SERVICES[service]["depends_on"]["credentials"]["condition"]
        assert condition == "service_completed_successfully"
    assert "restart" not in SERVICES["credentials"]


def stages() -> dict[str, str]:
    """The Dockerfile's stages by name, in their order; each with those that it comes from."""
    found: dict[str, str] = {}
    for text in re.split(r"^(?=FROM )", DOCKERFILE, flags=re.M)[1:]:
        base, name = re.match(r"FROM (\S+) AS (\S+)\n", text).groups()
        assert base == "${BASE}" or base in found
        found[name] = found.get(base, "") + text
    return found


def test_two_images_of_which_the_last_is_made_where_none_is_named() -> None:
    assert [*stages()][-1] == "shardwell"
    assert {each["image"] for each in SERVICES.values()} == {"shardwell", "shardwell-demo"}
    assert "build-demo" not in stages()["shardwell"]
    assert "--from=build-demo" in stages()["shardwell-demo"]


def test_what_shards_install_has_no_scikit_learn(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import lock

    of_shards, of_demo = (
        {pin.name: pin.version for pin in lock.read(ROOT / path)}
        for path in (lock.IMAGE_LOCK, lock.DEMO_LOCK)
    )
    demo_only = {"scikit-learn", "scipy", "joblib", "threadpoolctl"}
    assert not demo_only & of_shards.keys()
    assert of_demo.keys() >= demo_only | of_shards.keys()
    assert of_shards.items() <= of_demo.items()


def test_nothing_is_installed_that_no_hash_names() -> None:
    text = DOCKERFILE.replace("\\\n", " ")
    commands = re.findall(r"pip (?:--python \S+ )?((?:install|wheel) [^&\n]*)", text)
    locks = []
    for command in commands:
        words = command.split()
        if "-r" in words:
            assert {"--require-hashes", "--only-binary"} <= {*words}
            locks.append(words[words.index("-r") + 1])
        else:  # the wheel of what is here
            assert "--no-deps" in words
            assert {"--no-index", "--no-build-isolation"} & {*words}
    names = ("requirements-build", "requirements", "requirements-demo")
    assert locks == [f"deploy/{name}.txt" for name in names]
    for path in locks:
        pins = re.split(r"\n(?=[a-z])", (ROOT / path).read_text())[1:]
        assert all(re.match(r"\S+==\S+ .*?\n    --hash=sha256:[0-9a-f]{64}", pin) for pin in pins)
    assert not re.findall(r"apt-get|curl|wget|^ADD", text, re.M)


@pytest.mark.parametrize("name", ["shardwell", "shardwell-demo"])
def test_an_image_has_labels_and_a_user_by_number(name) -> None:
    text = stages()[name]
    given = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)=("[^"]*"|\S*)', text))
    default = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.M))
    assert given.pop("description").strip('"').startswith("A shard" if name == "shardwell" else "S")
    assert given == {
        "title": name,
        "licenses": PROJECT["license"],
        "version": "${VERSION}",
        "revision": "${REVISION}",
        "base.name": "${BASE}",
    }
    assert default["VERSION"] == PROJECT["version"]
    assert re.findall(r"^USER (\S+)", text, re.M) == [USER]
    uid, gid = USER.split(":")
    assert f"groupadd --gid {gid} " in text
    assert f"useradd --uid {uid} --gid {gid} " in text


def test_the_image_has_the_scripts_and_directories_that_its_user_owns() -> None:
    lines = re.findall(r"install -d -o shardwell -g shardwell ([^\n\\&]*)", DOCKERFILE)
    owned = {word for line in lines for word in line.split() if word.startswith("/")}
    assert owned == set().union(*map(mounts_of, SERVICES))
    scripts = [str(path.relative_to(ROOT)) for path in (SCRIPT, FORWARDER)]
    assert f"COPY {' '.join(scripts)} /usr/local/bin/" in DOCKERFILE
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{script}" for script in scripts} <= {*ignored}
    assert SERVICES["credentials"]["entrypoint"] == [SCRIPT.name]
    assert os.access(SCRIPT, os.X_OK)
    assert SERVICES["ports"]["entrypoint"] == ["python", f"/usr/local/bin/{FORWARDER.name}"]


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


def check_page(address: str, tmp_path: Path) -> None:
    """The status page lets in those that have the shards' token, and no others."""
    tls = ssl.create_default_context(cafile=str(tmp_path / "shards/ca.pem"))
    token = (tmp_path / "shards/status.token").read_text().strip()
    for headers, expected in (({}, 401), ({"Authorization": f"Bearer {token}"}, 200)):
        connection = http.client.HTTPSConnection(address, context=tls, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", "/status.json", headers=headers)
            response = connection.getresponse()
            assert response.status == expected
            assert (b"digits" in response.read()) == (expected == 200)


def check_ports(address: str, environment: Mapping[str, str]) -> None:
    """Through the service `ports`, a client reaches the shard, whose certificate it sees."""
    with forwarded(address) as (forwarder, (_, port)):
        through = {TARGET_VARIABLE: f"localhost:{port}"}
        code, output, log = run_command("status", environment={**environment, **through})
        assert (code, "digits" in output) == (0, True), (output, log)
        forwarder.send(signal.SIGTERM)
        assert forwarder.end() == 0


@contextlib.contextmanager
def forwarded(address: str) -> Iterator[tuple[Program, tuple[str, int]]]:
    """The program of the service `ports`, and where it listens."""
    port = free_port()
    with Program(str(FORWARDER), f"{port}={address}") as forwarder:
        assert forwarder.read_line() == f"{port} leads to {address}"
        yield forwarder, ("127.0.0.1", port)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """What it leads to."""
    with socket.create_server(("127.0.0.1", 0), backlog=CONNECTION_COUNT_MAX + 1) as server:
        server.settimeout(PATIENCE_S)
        yield server


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(2**16), b""))


def is_ended(connection: socket.socket) -> bool:
    """Waits until the other end has sent something, or closed."""
    try:
        return not connection.recv(1)
    except ConnectionError:
        return True


def test_all_bytes_arrive_after_the_other_end_sends_no_more(listener) -> None:
    sent = np.random.default_rng(0).bytes(8 * 2**20)
    with (
        forwarded(address_of(listener)) as (_, where),
        socket.create_connection(where, PATIENCE_S) as client,
        listener.accept()[0] as server,
        ThreadPoolExecutor(1) as others,
    ):
        received = others.submit(read_all, server)
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert received.result(PATIENCE_S) == sent
        answered = others.submit(read_all, client)
        server.sendall(sent[::-1])
        server.shutdown(socket.SHUT_WR)
        assert answered.result(PATIENCE_S) == sent[::-1]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_connection_that_is_cut_at_one_end_is_cut_at_the_other(listener, is_first) -> None:
    with (
        forwarded(address_of(listener)) as (_, where),
        socket.create_connection(where, PATIENCE_S) as client,
        listener.accept()[0] as server,
    ):
        cut, other = (client, server) if is_first else (server, client)
        other.settimeout(PATIENCE_S)
        cut.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        cut.close()
        assert is_ended(other)


def test_a_missing_shard_is_logged_and_the_next_connection_is_taken() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with forwarded(nobody) as (forwarder, where):
        for _ in range(2):
            with socket.create_connection(where, PATIENCE_S) as client:
                assert is_ended(client)
        forwarder.send(signal.SIGTERM)
        assert forwarder.end() == 0
        assert [line.startswith(f"{nobody} can't be reached: ") for line in forwarder.log] == [
            True,
            True,
        ]


def test_more_connections_than_there_may_be_are_closed_at_once(listener) -> None:
    with (
        forwarded(address_of(listener)) as (_, where),
        contextlib.ExitStack() as stack,
    ):
        ends = []
        for _ in range(CONNECTION_COUNT_MAX):
            ends.append(stack.enter_context(socket.create_connection(where, PATIENCE_S)))
            ends.append(stack.enter_context(listener.accept()[0]))
        with socket.create_connection(where, PATIENCE_S) as one_more:
            assert is_ended(one_more)
        for end in ends[:2]:
            end.close()
        listener.settimeout(0.05)

        def is_taken() -> bool:
            try:
                with socket.create_connection(where, PATIENCE_S), listener.accept()[0]:
                    return True
            except OSError:  # the forwarder has not seen the end of the other yet
                return False

        eventually("a connection is taken after another has ended", is_taken)


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
    admin_port = free_port()
    of_shard = with_files_here(SHARDS[0]) | {
        "SHARDWELL_SHARD_COUNT": "1",
        "SHARDWELL_LISTEN": address.replace("127.0.0.1", "0.0.0.0"),
        "SHARDWELL_ADMIN_LISTEN": f"0.0.0.0:{admin_port}",
        "SHARDWELL_DATA_DIR": f"{tmp_path}/data",
        "SHARDWELL_SAME_HOST": f"{tmp_path}/sockets",
    }
    of_worker = with_files_here(WORKERS[0]) | {"SHARDWELL_WORKER_COUNT": "1"}
    with Program("-m", "shardwell_server", "serve", environment=of_shard) as shard:
        assert shard.read_line() == f"serving on {of_shard['SHARDWELL_LISTEN']}"
        assert run_command("health", of_shard["SHARDWELL_LISTEN"], environment=of_shard)[0] == 0
        code, output, log = run_command("train-digits", environment=of_worker)
        assert code == 0, (output, log)
        check_page(f"127.0.0.1:{admin_port}", tmp_path)
        check_ports(address, of_worker)
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
