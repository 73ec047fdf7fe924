"""Goal: tokens in one command each, from the command line to a worker that is let in.

Method: the real commands, as a user types them; what is written is looked at with nothing of ours.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import stat
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from harness.programs.commands import Program, ServingShard, run_command
from harness.threads import together

SGD = shardwell.SGD(learning_rate=1.0)


def entries(path: Path) -> dict[str, dict]:
    return {each["name"]: each for each in json.loads(path.read_text())["tokens"]}


def made(path: Path, name: str, *flags: str, verb: str = "create") -> Path:
    """The file of a token's secret, as the command names it."""
    code, output, log = run_command("token", verb, name, f"--tokens={path}", *flags)
    assert code == 0, log
    lines = [shlex.split(line) for line in output.splitlines() if not line.startswith("#")]
    settings = dict(line[1].split("=", 1) for line in lines)
    assert settings["SHARDWELL_TOKENS"] == str(path)
    return Path(settings["SHARDWELL_TOKEN_FILE"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "the tokens" / "tokens.json"


@pytest.fixture(autouse=True)
def _directory(path: Path) -> None:
    path.parent.mkdir()


def test_what_is_written(path) -> None:
    file = made(
        path,
        "ci",
        "--right=read:prod-",
        "--right=contribute:test-",
        "--expires-in=30d",
        "--streams=5",
        "--bytes-per-s=1MB/s",
        "--stored-bytes=50MB",
    )
    assert file == path.parent / "ci.token"
    secret = file.read_text().strip()
    assert len(secret) >= 43
    entry = entries(path)["ci"]
    assert entry.pop("expires").endswith("Z")
    assert entry == {
        "name": "ci",
        "sha256": [hashlib.sha256(secret.encode()).hexdigest()],
        "rights": ["read:prod-", "contribute:test-"],
        "quota": {"stored_bytes": 50000000, "streams": 5, "bytes_per_s": 1000000},
    }
    for each in (path, file):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    code, output, _ = run_command("token", "list", f"--tokens={path}")
    assert code == 0
    assert "read:prod- contribute:test-" in " ".join(output.split())
    assert secret not in output
    other = made(path, "other", "--right=admin", f"--out={path.parent / 'elsewhere'}")
    assert other == path.parent / "elsewhere"
    assert entries(path).keys() == {"ci", "other"}


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("create", "ci", "--right=read"), 1, "has a token 'ci' already: `shardwell token renew"),
        (("create", "a b", "--right=read"), 2, "the name of a token must be"),
        (("create", "b", "--right=root"), 2, "a right is RIGHT:PREFIX"),
        (("create", "b", "--right=read:a b"), 2, "a right is RIGHT:PREFIX"),
        (("create", "b"), 2, "Missing option '--right'"),
        (("create", "b", "--right=read", "--expires-in=soon"), 2, "no number of s, m, h or d"),
        (("create", "b", "--right=read", "--expires-in=999999999d"), 2, "up to 36500d"),
        (("create", "b", "--right=read", "--streams=-1"), 2, "--streams"),
        (("create", "b", "--right=read", "--stored-bytes=50M"), 2, "as 50MB"),
        (("renew", "nobody"), 1, "has no token 'nobody'"),
        (("revoke", "nobody"), 1, "has no token 'nobody'"),
    ],
)
def test_impossible_arguments_of_token(path, arguments, code, reason) -> None:
    made(path, "ci", "--right=read", f"--out={path.parent / 'kept'}")
    before = path.read_bytes()
    found, output, log = run_command("token", *arguments, f"--tokens={path}")
    assert (found, output) == (code, "")
    assert reason in " ".join(log.split())
    assert path.read_bytes() == before
    assert {each.name for each in path.parent.iterdir()} == {"tokens.json", "kept"}


def test_a_file_of_the_users_is_no_place_for_a_secret(path) -> None:
    """Nor is a link, wherever it leads: to nothing here."""
    file = made(path, "ci", "--right=read")
    before = path.read_bytes()
    for theirs in ("mine\n", "", f"{'x' * 42}\n"):
        file.write_text(theirs)
        code, _, log = run_command("token", "renew", "ci", f"--tokens={path}")
        assert code == 1
        assert f"{file} exists" in " ".join(log.split())
        assert (path.read_bytes(), file.read_text()) == (before, theirs)
    file.unlink()
    file.symlink_to(path.parent / "nothing")
    for command in (("renew", "ci"), ("create", "new", "--right=read", f"--out={file}")):
        code, _, log = run_command("token", *command, f"--tokens={path}")
        assert code in (1, 2)
        assert f"{file} exists" in " ".join(log.split())
        assert file.is_symlink()
        assert path.read_bytes() == before
    file.unlink()
    assert run_command("token", "renew", "ci", f"--tokens={path}")[0] == 0


@pytest.mark.parametrize("contents", ["{", "[]", '{"tokens": [{"name": "a"}]}'])
def test_a_file_that_is_no_token_file_stays_as_it_is(path, contents) -> None:
    path.write_text(contents)
    code, _, log = run_command("token", "create", "ci", "--right=read", f"--tokens={path}")
    assert code == 1
    assert str(path) in log
    assert path.read_text() == contents
    assert run_command("token", "list", f"--tokens={path}")[0] == 1


def test_what_has_expired_is_marked(path) -> None:
    made(path, "old", "--right=read", "--expires-in=1s")
    made(path, "new", "--right=read", "--expires-in=1h")

    def shown() -> str:
        _, output, _ = run_command("token", "list", f"--tokens={path}")
        return " ".join(output.split())

    output = eventually("it has ended", lambda: found if "(expired)" in (found := shown()) else "")
    assert output.count("(expired)") == 1
    assert output.index("old") < output.index("(expired)") < output.index("new")


def test_several_at_once(path) -> None:
    """None of them is lost."""
    names = [f"t{number}" for number in range(6)]
    together([lambda name=name: made(path, name, "--right=read") for name in names])
    assert entries(path).keys() == set(names)


def test_from_the_command_line_to_a_worker(path) -> None:
    file = made(path, "workers", "--right=create")
    with ServingShard(f"--tokens={path}") as shard:
        address = shard.address()
        variables = {"SHARDWELL_TOKEN_FILE": str(file), "SHARDWELL_SHARDS": address}
        for arguments in (("status",), ("bench", "--megabytes=1", "--seconds=0.01")):
            code, _, log = run_command(*arguments, environment=variables)
            assert code == 0, log
        code, _, log = run_command("status", f"--shards={address}")
        assert code == 1
        assert run_command("health", address)[0] == 0
        with shardwell.connect(address, worker_id="w0", token_file=file) as client:
            net = client.parameter("net", size=9, optimizer=SGD)
            net.init(np.zeros(9, np.float32))
            assert net.exchange(np.ones(9, np.float32)).tolist() == [-1] * 9
            made(path, "workers", verb="renew")  # the client takes it up, and the old one is good
            assert net.exchange(np.ones(9, np.float32)).tolist() == [-2] * 9
            made(path, "workers", "--drop-old", verb="renew")
            assert net.exchange(np.ones(9, np.float32)).tolist() == [-3] * 9
            assert len(entries(path)["workers"]["sha256"]) == 1
            assert run_command("token", "revoke", "workers", f"--tokens={path}")[0] == 0

            def is_revoked() -> bool:
                try:
                    shardwell.connect(address, worker_id="w1", token_file=file).close()
                except shardwell.AuthenticationError:
                    return True
                return False

            eventually("it is no token any more", is_revoked)
    assert file.read_text().strip() not in "".join(shard.log)


def test_old_secrets_stay_good_for_a_while(path) -> None:
    secrets = [made(path, "ci", "--right=read").read_text()]
    for _ in range(5):
        secrets.append(made(path, "ci", verb="renew").read_text())
    digests = [hashlib.sha256(secret.strip().encode()).hexdigest() for secret in secrets]
    assert entries(path)["ci"]["sha256"] == digests[-4:]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--listen=0.0.0.0:0"], "can be reached from other machines, and there is no TLS"),
        (["--tokens=missing.json"], "Error: missing.json can't be read: No such file"),
        (["--jwt-keys=missing.json"], "Error: missing.json can't be read: No such file"),
    ],
)
def test_what_serve_refuses(flags, reason) -> None:
    code, output, log = run_command("serve", "--shard-index=0", "--shard-count=1", *flags)
    assert (code, output) == (2, "")
    assert reason in log


def test_a_variable_that_is_empty_opens_nothing() -> None:
    for name in ("SHARDWELL_TOKENS", "SHARDWELL_JWT_KEYS"):
        code, _, log = run_command(
            "serve", "--shard-index=0", "--shard-count=1", environment={name: ""}
        )
        assert code == 2
        assert f"${name} is empty" in log


def test_a_cluster_of_this_machine(path) -> None:
    file = made(path, "workers", "--right=create")
    with Program("-m", "shardwell_server", "cluster", "--shard-count=2", f"--tokens={path}") as it:
        target = it.read_line().removeprefix("export SHARDWELL_SHARDS=")
        with pytest.raises(shardwell.AuthenticationError, match="a token is needed"):
            shardwell.connect(target, token_file=False)
        with shardwell.connect(target, token_file=file) as client:
            assert len(client.status()) == 2


def test_what_a_shard_writes_is_its_user_s(tmp_path) -> None:
    """A directory that others could look into is closed to them."""
    directory = tmp_path / "data"
    directory.mkdir(mode=0o755)
    with (
        ServingShard(f"--data-dir={directory}") as shard,
        shardwell.connect(shard.address(), worker_id="w0") as client,
    ):
        client.parameter("net", size=9, optimizer=SGD).init(np.zeros(9, np.float32))
        client.table("rows", row_count=9, dim=2, optimizer=SGD)
        found = [directory, *directory.rglob("*")]
        assert len(found) > 5
        for each in found:
            assert not stat.S_IMODE(each.stat().st_mode) & 0o077, each


def test_a_file_that_others_may_read_stays_so(path) -> None:
    """Shards may be another user's, and the name a link."""
    made(path, "a", "--right=read")
    path.chmod(0o640)
    link = path.with_name("link.json")
    link.symlink_to(path)
    code, _, log = run_command("token", "create", "b", "--right=read", f"--tokens={link}")
    assert code == 0, log
    assert link.is_symlink()
    assert entries(path).keys() == {"a", "b"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
