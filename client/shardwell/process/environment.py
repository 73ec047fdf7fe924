"""The surroundings of this process: variables, and the machine's name."""

from __future__ import annotations

import os
import re
import socket

_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]+")


def variable(name: str) -> str:
    """A variable without blanks and line ends around it, as from Windows; "" if not set."""
    return os.environ.get(name, "").strip()


def host_name() -> str:
    """The machine's name, as text that a message can carry."""
    name = socket.gethostname().encode(errors="surrogateescape").decode(errors="replace")
    return name or "localhost"


def host_id() -> str:
    """The machine's name as a part of an id: what no id has is replaced by a hyphen."""
    return _NOT_IN_IDS.sub("-", host_name()).strip("._-") or "host"
