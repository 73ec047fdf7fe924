"""Goal: the unit in deploy/systemd starts a shard that serves, is closed as far as a shard can be,
and names nothing that `shardwell serve` does not know.

Method: systemd-analyze reads the unit, where there is one. The line that starts the shard is run as
systemd would, with the settings of the example; certificates, tokens, directories and port are
the test's. No systemd runs here: user, directories and hardening are not tried.
"""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

import shardwell
from harness.programs.commands import Program, run_command
from harness.programs.ports import free_port
from shardwell.client import TARGET_VARIABLE
from shardwell.connection.credentials import TOKEN_FILE_VARIABLE
from shardwell.connection.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from shardwell_server.cli.quantities import Duration
from shardwell_server.cli.serve import serve

SYSTEMD = Path(__file__).parents[3] / "deploy/systemd"
UNIT = SYSTEMD / "shardwell@.service"
EXAMPLE = SYSTEMD / "shard.env.example"
PROGRAM = "/opt/shardwell/bin/shardwell"
STATE_DIRECTORIES = "/var/lib"
"""What %S is, of a service of the system."""
NEWER_KEYS = ("RestartSteps", "RestartMaxDelaySec")
"""Of systemd 254; those before ignore them, and say so."""
EXPOSURE_TENTHS_MAX = 15
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)  # keys that are given twice: the last
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def service(key: str) -> str:
    return unit()["Service"][key]


def settings() -> dict[str, str]:
    """What the example gives, as systemd reads it."""
    lines = EXAMPLE.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def offered() -> dict[str, str]:
    """Variables in the example, those too that are given only as a hint."""
    found = re.findall(r"^#?(SHARDWELL_\w+)=(.*)$", EXAMPLE.read_text(), re.MULTILINE)
    return dict(found)


def seconds(text: str) -> float:
    """A span of time, as systemd reads it."""
    number, unit_ = re.fullmatch(r"(\d+)\s*(s|min|)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "": 1, "min": 60}[unit_]


def words_for(index: int) -> list[str]:
    """The line that starts a shard, with what systemd puts in."""
    line = service("ExecStart").replace("%i", str(index)).replace("%S", STATE_DIRECTORIES)
    assert "%" not in line
    return shlex.split(line)


@needs_systemd
def test_systemd_understands_the_unit(tmp_path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))
    done = subprocess.run(
        [ANALYZE, "verify", copy], capture_output=True, text=True, timeout=60, check=False
    )
    said = [line for line in done.stderr.splitlines() if str(copy) in line or UNIT.stem in line]
    assert [line for line in said if not any(f"'{key}'" in line for key in NEWER_KEYS)] == []
    assert done.returncode == 0


@needs_systemd
def test_the_unit_is_closed() -> None:
    done = subprocess.run(
        [
            *(ANALYZE, "security", "--offline=true", f"--threshold={EXPOSURE_TENTHS_MAX}"),
            *("--no-pager", UNIT),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_flags_and_variables_are_those_of_serve() -> None:
    program, command, *flags = words_for(0)
    assert (program, command) == (PROGRAM, "serve")
    given = {flag.partition("=")[0] for flag in flags}
    assert given <= {name for option in serve.params for name in option.opts}
    assert given == {"--shard-index", "--data-dir"}
    known: set[str] = set()
    for option in serve.params:
        assert isinstance(option, click.Option)
        names = option.envvar or []
        known.update([names] if isinstance(names, str) else names)
    assert offered().keys() <= known


def test_what_the_unit_gives_is_where_the_shard_looks() -> None:
    index, data_dir = words_for(7)[2:]
    assert index == "--shard-index=7"
    assert data_dir == f"--data-dir={STATE_DIRECTORIES}/shardwell/shard-7"
    assert service("StateDirectory") == "shardwell/shard-%i"
    assert service("EnvironmentFile") == "/etc/shardwell/shard-%i.env"
    audit_log = Path(offered()["SHARDWELL_AUDIT_LOG"])
    assert audit_log.parent == Path("/var/log") / service("LogsDirectory")


def test_the_shard_has_time_to_stop() -> None:
    (grace,) = (option for option in serve.params if option.name == "grace_s")
    for given in (grace.default, settings()["SHARDWELL_GRACE_S"]):
        grace_s = Duration(0.0).convert(given, None, None)
        assert seconds(service("TimeoutStopSec")) > 2 * grace_s
    # One that ends by itself stays down; one that is killed, or can't go on, does not.
    assert service("Restart") == "on-failure"
    assert service("RestartPreventExitStatus") == "2"


def test_nothing_is_closed_that_a_shard_needs() -> None:
    keys = unit()["Service"]
    assert {"PrivateNetwork", "ProcSubset", "IPAddressDeny", "LoadCredential"} & set(keys) == set()
    assert set(keys["RestrictAddressFamilies"].split()) == {"AF_INET", "AF_INET6", "AF_UNIX"}
    assert "DynamicUser" not in keys
    assert "~@resources" not in UNIT.read_text().partition("NoNewPrivileges=")[2]


def test_the_line_with_the_example_starts_a_shard_that_serves(tmp_path) -> None:
    made = tmp_path / "etc"
    tokens = f"{made}/tokens.json"
    assert run_command("certs", str(made))[0] == 0
    created = run_command("token", "create", "workers", "--right", "create", "--tokens", tokens)
    assert created[0] == 0, created
    given = {
        name: value.replace("/etc/shardwell/", f"{made}/") for name, value in settings().items()
    }
    assert {Path(v) for v in given.values() if v.startswith("/")} <= set(made.iterdir())
    address = f"127.0.0.1:{free_port()}"
    given["SHARDWELL_LISTEN"] = address.replace("127.0.0.1", "0.0.0.0")
    given["SHARDWELL_SHARD_COUNT"] = "1"
    data_dir = tmp_path / "state/shardwell/shard-0"
    words = [word.replace(STATE_DIRECTORIES, f"{tmp_path}/state") for word in words_for(0)[1:]]
    clients = {
        CA_VARIABLE: f"{made}/ca.pem",
        CERT_VARIABLE: f"{made}/client.pem",
        KEY_VARIABLE: f"{made}/client.key",
        TOKEN_FILE_VARIABLE: f"{made}/workers.token",
    }
    weights = []
    for life in range(2):
        with Program("-m", "shardwell_server", *words, environment=given) as shard:
            assert shard.read_line() == f"serving on {given['SHARDWELL_LISTEN']}"
            assert run_command("health", address, environment=clients)[0] == 0
            status = run_command("status", environment={TARGET_VARIABLE: address, **clients})
            assert status[0] == 0, status
            with shardwell.connect(
                address,
                worker_id="w0",
                tls=shardwell.Tls(
                    ca=clients[CA_VARIABLE], cert=clients[CERT_VARIABLE], key=clients[KEY_VARIABLE]
                ),
                token_file=clients[TOKEN_FILE_VARIABLE],
            ) as client:
                model = client.parameter("model", size=3, optimizer=shardwell.SGD(1.0))
                model.init(np.zeros(3, np.float32))
                assert model.next_step == life
                weights.append(model.exchange(np.ones(3, np.float32)))
            shard.send(signal.SIGTERM)
            assert shard.end(seconds(service("TimeoutStopSec"))) == 0, shard.log
        assert (data_dir / "shard.json").exists()
    assert (weights[1] == np.full(3, -2.0)).all()
