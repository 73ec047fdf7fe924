"""The surroundings of this process: variables, its machine, its identity there, its Python."""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
import socket
import sys
from functools import cache

_LOG = logging.getLogger("shardwell")

_PREFIX = "SHARDWELL_"
KNOWN_VARIABLES = (
    "ABANDONED_AFTER_S", "ADMIN_LISTEN", "ANSWER_BYTES_MAX", "ARENA_BYTES_MAX", "AUDIT_LOG",
    "BASE", "CHUNK_SIZE_BYTES", "CLUSTER_ID", "CODEC", "CONNECTION_AGE_S", "CONNECT_TIMEOUT_S",
    "CONTRIBUTION_DIR", "CONTRIBUTION_LOG", "DATA_DIR", "DURABILITY", "ENCODED_CHUNK_COUNT_MAX",
    "GRACE_S", "GROUP", "INIT_CLAIM_S", "INSECURE", "JWT_KEYS", "LAUNCHER",
    "LEARNING_RATE_CHANGE_COUNT_MAX", "LISTEN", "LOG_FORMAT", "LOG_LEVEL", "MODE", "NATIVE",
    "PARAMETER", "PARAMETER_COUNT_MAX", "PORT", "REFLECTION", "RENDEZVOUS", "RENDEZVOUS_PORT",
    "RESTART", "REVISION", "SAME_HOST", "SESSION_COUNT_MAX", "SESSION_LEASE_S", "SHARDS",
    "SHARD_COUNT", "SHARD_INDEX", "SHARD_MEMORY", "SNAPSHOT_COUNT_MAX", "STEPS",
    "STORED_BYTES_MAX", "STRATEGY", "STREAM_COUNT_MAX", "SYNC", "TABLE_COUNT_MAX",
    "TABLE_ROW_COUNT_MAX", "THREADS", "TIMEOUT_S", "TLS_CA", "TLS_CERT", "TLS_CLIENT_CA",
    "TLS_KEY", "TLS_SERVER_NAME", "TOKENS", "TOKEN_FILE", "USE_PROXY", "WAIT_MAX_S",
    "WORKER_COUNT", "WORKER_COUNT_MAX", "WORKER_ID", "WORKER_INDEX", "WORKER_MEMORY",
    "WORKER_METRICS",
)  # fmt: skip
"""The variables of the SDK, the commands, the image and docker-compose.yml, without the prefix."""
_OF_OTHERS = re.compile(r"(TEST|SOAK|WHEEL)_.*|(.*_)?(SERVICE_HOST|SERVICE_PORT.*|PORT(_\d+_.*)?)")
"""Those of this project's tests, and those that Kubernetes sets for a service called shardwell."""
_NEAR = 0.65
"""Similarity of a slip of the pen; a name that resembles none is the user's own."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PROCESS_NAMESPACE = "/proc/self/ns/pid"
_STARTED_FIELD = 19
"""Of /proc/PID/stat behind the name: when the process started, in ticks since the machine did."""
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]+")


def variable(name: str) -> str:
    """A variable without blanks and line ends around it, as from Windows; "" if not set."""
    return os.environ.get(name, "").strip()


def is_on(name: str) -> bool:
    """True if a variable is set to a word for yes."""
    return variable(name).lower() in ("1", "true", "yes", "on")


def misspelt_variables() -> list[str]:
    """Returns a sentence for each set variable that nothing reads, and that is like a known one."""
    said = []
    for name in sorted(os.environ):
        rest = name.removeprefix(_PREFIX)
        if rest == name or rest in KNOWN_VARIABLES or _OF_OTHERS.fullmatch(rest):
            continue
        if near := difflib.get_close_matches(rest.upper(), KNOWN_VARIABLES, n=1, cutoff=_NEAR):
            said.append(f"nothing reads ${name}; did you mean ${_PREFIX}{near[0]}?")
    return said


@cache
def warn_of_misspelt_variables() -> None:
    """Logs `misspelt_variables`, once in a process."""
    for each in misspelt_variables():
        _LOG.warning("%s", each)


def host_name() -> str:
    """The machine's name, as text that a message can carry."""
    name = socket.gethostname().encode(errors="surrogateescape").decode(errors="replace")
    return name or "localhost"


def host_id() -> str:
    """The machine's name as a part of an id: what no id has is replaced by a hyphen."""
    return _NOT_IN_IDS.sub("-", host_name()).strip("._-") or "host"


def install_command(*arguments: str) -> str:
    """Returns a shell's line with pip of this Python, which does not look for Shardwell itself."""
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *arguments])


def own_identity() -> str:
    """Words by which a process of this machine can look this one up; "" where there are none."""
    try:
        return f"{_surroundings()} {os.getpid()} {_state_of(os.getpid())[1]}"
    except (OSError, ValueError):
        return ""


def has_ended(identity: str) -> bool:
    """True if the process of an `own_identity` is known to have ended."""
    try:
        surroundings, pid, started = identity.rsplit(" ", 2)
        if surroundings != _surroundings():
            return False
        if int(pid) <= 0:  # which would be a group
            return False
        os.kill(int(pid), 0)
        state, found = _state_of(int(pid))
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):  # not for this user to know
        return False
    return state in ("Z", "X") or found != started


def _surroundings() -> str:
    with open(_BOOT_ID, encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink(_PROCESS_NAMESPACE)}"


def _state_of(pid: int) -> tuple[str, str]:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], fields[_STARTED_FIELD]
