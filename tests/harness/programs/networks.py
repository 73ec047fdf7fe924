"""Two machines, as far as their networks go: namespaces of the test's own, with a cable between.

Each has a loopback interface and an address of its own. They belong to a user namespace, so that no
privileges are needed where the system lets users make one.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from harness.polling import eventually

_EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of the two."""

    pid: int
    """Of the process that keeps its namespaces."""
    host: str
    """Its address, which the other one reaches."""

    def command(self, *command: str) -> list[str]:
        """The same command, on this machine."""
        return ["nsenter", "-t", str(self.pid), "-U", "-n", "--preserve-credentials", *command]

    def python(self, *arguments: str) -> list[str]:
        """Arguments behind `python` that run Python with `arguments` on this machine."""
        return ["-c", _EXEC, *self.command(sys.executable, *arguments)]


def can_be_made() -> bool:
    """Whether this system lets the tests make network namespaces."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    with contextlib.suppress(OSError):
        return subprocess.run(["unshare", "-Urn", "true"], capture_output=True).returncode == 0
    return False


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """They end with the context, and what runs on them must have ended before."""
    with contextlib.ExitStack() as stack:

        def kept(*command: str) -> int:
            """A process that says when its namespaces are made, and ends with its input."""
            keeper = subprocess.Popen(
                [*command, "sh", "-c", "echo made; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(keeper.communicate)
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == b"made\n"
            return keeper.pid

        first = Machine(pid=kept("unshare", "-Urn"), host="10.77.0.1")
        second = Machine(pid=kept(*first.command("unshare", "-n")), host="10.77.0.2")
        cable = "ip link add cable type veth peer name cable netns"
        _run(first, f"{cable} {second.pid}")
        for machine in (first, second):
            _run(machine, f"ip addr add {machine.host}/24 dev cable")
            _run(machine, "ip link set lo up")
            _run(machine, "ip link set cable up")
        eventually("the cable is up", lambda: _reaches(first, second.host))
        yield first, second


def _reaches(machine: Machine, host: str) -> bool:
    """Whether a packet comes there and back: a port without a listener answers at once."""
    look = f"import socket; print(socket.socket().connect_ex(({host!r}, 9)))"
    found = subprocess.run(
        machine.command(sys.executable, "-c", look), capture_output=True, text=True, check=True
    )
    return found.stdout.strip() == "111"


def _run(machine: Machine, command: str) -> None:
    subprocess.run(machine.command(*command.split()), check=True)
