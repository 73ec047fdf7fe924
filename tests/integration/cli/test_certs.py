"""Goal: certificates in one command, and TLS from the command line to the end.

Method: the real commands, as a user types them.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.files import contents_of
from harness.programs.commands import Program, ServingShard, run_command
from shardwell import Tls

SGD = shardwell.SGD(learning_rate=1.0)
WIDE = {"COLUMNS": "300"}
TLS_VARIABLES = ("SHARDWELL_TLS_CA", "SHARDWELL_TLS_CERT", "SHARDWELL_TLS_KEY")


def variables(line: str) -> dict[str, str]:
    """Those that a line for a shell sets."""
    word, *settings = shlex.split(line)
    assert word == "export"
    return dict(setting.split("=", 1) for setting in settings)


def tls_of(given: dict[str, str]) -> Tls:
    ca, cert, key = (given[name] for name in TLS_VARIABLES)
    return Tls(ca=ca, cert=cert, key=key)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, str], dict[str, str]]:
    """A directory of certificates, and what shards and workers set."""
    directory = tmp_path / "the certs"
    code, output, log = run_command("certs", str(directory))
    assert code == 0, log
    assert "ca.key makes certificates" in log
    lines = [variables(line) for line in output.split("\n") if not line.startswith("#")]
    return directory, lines[0], lines[1]


def test_certificates_shards_and_workers(made) -> None:
    _, of_shards, of_workers = made
    flags = [
        f"--tls-cert={of_shards['SHARDWELL_TLS_CERT']}",
        f"--tls-key={of_shards['SHARDWELL_TLS_KEY']}",
        f"--tls-client-ca={of_shards['SHARDWELL_TLS_CA']}",
    ]
    with ServingShard(*flags) as shard:
        address = shard.address()
        with shardwell.connect(address, worker_id="w0", tls=tls_of(of_workers)) as client:
            net = client.parameter("net", size=9, optimizer=SGD)
            net.init(np.zeros(9, np.float32))
            assert net.exchange(np.ones(9, np.float32)).tolist() == [-1] * 9
        for command in (
            ("status", f"--shards={address}"),
            ("health", address),
            ("bench", f"--shards={address}", "--megabytes=1", "--seconds=0.1"),
        ):
            code, output, log = run_command(*command, environment=of_workers)
            assert code == 0, (command, output, log)
        code, output, _ = run_command("status", f"--shards={address}", environment=WIDE)
        assert code == 1
        assert "not let in" in output
        assert "speaks TLS, and this side does not: give tls=" in output
        code, _, log = run_command("bench", f"--shards={address}")
        assert code == 1
        assert "speaks TLS, and this side does not: give tls=" in log
        assert "SHARDWELL_TLS_CA" in log
        code, _, log = run_command("health", address)
        assert code == 1
        assert "whether one of the two sides alone uses TLS" in log


def test_variables_are_enough_for_a_shard(made) -> None:
    """Without a certificate of a client, no client is let in."""
    _, of_shards, of_workers = made
    command = ["-m", "shardwell_server", "serve", "--shard-index=0", "--shard-count=1"]
    with Program(*command, "--listen=127.0.0.1:0", environment=of_shards) as shard:
        address = shard.read_line().removeprefix("serving on ")
        with shardwell.connect(address, tls=tls_of(of_workers)) as client:
            assert len(client.status()) == 1
        only_ca = Tls(ca=of_workers["SHARDWELL_TLS_CA"])
        with pytest.raises(shardwell.AuthenticationError, match="asks for a certificate"):
            shardwell.connect(address, tls=only_ca)


def test_again_it_renews(made) -> None:
    directory, _, _ = made
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert run_command("certs", str(directory))[0] == 0
    after = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert before.keys() == after.keys()
    same = sorted(name for name in before if before[name] == after[name])
    assert same == ["ca.key", "ca.pem"]


@pytest.mark.parametrize(
    "theirs", ["ca.key", "server.pem", "server.key", "client.pem", "client.key", "server.pem.part"]
)
def test_certificates_of_the_users_stay(tmp_path: Path, theirs: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / theirs).write_text("mine")
    code, _, log = run_command("certs", str(tmp_path / "site"), environment=WIDE)
    assert code == 1
    assert f"{tmp_path / 'site' / theirs} is " in log
    assert "is not replaced; move it away" in log
    assert (tmp_path / "site" / theirs).read_text() == "mine"
    for name in ("server", "client"):
        assert not (tmp_path / "site" / f"{name}.pem").is_file() or theirs == f"{name}.pem"


@pytest.mark.parametrize("name", ["server.pem", "server.key", "client.pem", "client.key"])
def test_what_another_authority_made_stays(made, tmp_path: Path, name: str) -> None:
    directory, _, _ = made
    assert run_command("certs", str(tmp_path / "other"))[0] == 0
    (directory / name).write_bytes((tmp_path / "other" / name).read_bytes())
    before = contents_of(directory)
    code, _, log = run_command("certs", str(directory), environment=WIDE)
    assert code == 1
    assert f"{directory / name} is " in log
    assert contents_of(directory) == before


@pytest.mark.parametrize("name", ["ca", "server", "client"])
@pytest.mark.parametrize("is_key_replaced", [False, True])
def test_what_a_killed_one_left_is_finished(made, name: str, is_key_replaced: bool) -> None:
    """Killed before or after the key of a new certificate was in its place."""
    directory, _, _ = made
    before = contents_of(directory)
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    certificate.rename(directory / f"{name}.pem.part")
    if not is_key_replaced:
        key.unlink()
        if name == "ca":  # which is made first
            for other in directory.glob("[cs]*[tr].*"):
                other.unlink()
    code, _, log = run_command("certs", str(directory), "--host=localhost")
    assert code == 0, log
    after = contents_of(directory)
    assert after.keys() == before.keys()
    if name == "ca":
        assert (after["ca.pem"] == before["ca.pem"]) is is_key_replaced
    code, _, log = run_command("certs", str(directory))
    assert code == 0, log


def test_a_cluster_with_certificates_of_its_own(tmp_path: Path) -> None:
    for flags in ((), (f"--data-dir={tmp_path / 'data'}",)):
        arguments = ["-m", "shardwell_server", "cluster", "--shard-count=2", "--tls", *flags]
        with Program(*arguments) as program:
            given = variables(program.read_line())
            tls = tls_of(given)
            with shardwell.connect(given["SHARDWELL_SHARDS"], worker_id="w0", tls=tls) as client:
                net = client.parameter("net", size=9, optimizer=SGD)
                net.init(np.zeros(9, np.float32))
                assert net.exchange(np.ones(9, np.float32)).tolist() == [-1] * 9
            assert run_command("status", environment=given)[0] == 0
            program.process.terminate()
            assert program.end() == 0
        assert Path(given["SHARDWELL_TLS_CA"]).exists() == bool(flags)


def test_workers_of_a_run_meet_over_it(made, tmp_path: Path) -> None:
    program = tmp_path / "work.py"
    program.write_text(
        "import numpy as np, shardwell\n"
        "with shardwell.join_group() as group:\n"
        "    array = np.full(5, group.rank, np.float32)\n"
        "    group.all_reduce(array)\n"
        "    with shardwell.connect(worker_id=f'w{group.rank}') as client:\n"
        "        print(array.tolist(), len(client.status()))\n"
    )
    _, of_shards, _ = made
    code, output, log = run_command(
        "run", "-n2", "--with-shards", "--", sys.executable, str(program), environment=of_shards
    )
    assert code == 0, log
    assert output.count("[1.0, 1.0, 1.0, 1.0, 1.0] 2") == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tls-cert={server.pem}",), "come together"),
        (("--tls-client-ca={ca.pem}",), "--tls-client-ca needs --tls-cert and --tls-key"),
        (("--tls-cert={server.pem}", "--tls-key={client.key}"), "are no certificate and its key"),
        (("--tls-cert={missing}", "--tls-key={server.key}"), "can't be read: No such file"),
    ],
)
def test_flags_that_do_not_fit(made, flags, words) -> None:
    directory, _, _ = made
    given = [flag.replace("{", f"{directory}/").replace("}", "") for flag in flags]
    code, _, log = run_command("serve", "--shard-index=0", "--shard-count=1", *given)
    assert code == 2
    assert words in " ".join(log.split())


@pytest.mark.parametrize("host", ["a b", "host:7070", "", "-x"])
def test_what_is_no_host(tmp_path: Path, host: str) -> None:
    code, _, log = run_command("certs", str(tmp_path / "certs"), f"--host={host}")
    assert code == 2
    assert "a host is a name or an IP address" in " ".join(log.split())


@pytest.mark.parametrize("sync", ["server", "ring"])
def test_the_demo_s_cluster_is_none_that_the_variables_are_of(made, sync: str) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn brings the digits")
    _, _, of_workers = made
    _, output, log = run_command("demo", f"--sync={sync}", "--steps=40", environment=of_workers)
    assert "held-out accuracy" in output, log
