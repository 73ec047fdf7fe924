"""Programs of the system that some tests need: skipped without them, or failed where they must run.

`SHARDWELL_TEST_REQUIRE=chromium,prometheus,promtool,slurm` turns the skips of those into failures:
the scripts that install them set it, so that no skip is taken for a pass.
"""

from __future__ import annotations

import os
import shutil
import socket

import pytest

VARIABLE = "SHARDWELL_TEST_REQUIRE"
_INSTALLED_BY = {
    "chromium": "apt-get install -y chromium",
    "git": "apt-get install -y git",
    "ipv6": "sysctl net.ipv6.conf.lo.disable_ipv6=0",
    "prometheus": "apt-get install -y prometheus",
    "promtool": "apt-get install -y prometheus",
    "slurm": "apt-get install -y slurmctld slurmd slurm-client munge",
}
"""By what a test needs: the command that installs it on Debian."""


def program(name: str) -> str:
    """Path of a program; without it the test is skipped, or failed where it is required."""
    found = shutil.which(name)
    if found is None:
        missing(name, "no such program on PATH")
    return found


def ipv6() -> None:
    """Ends a test where this machine has no address of its own of IPv6, as in many containers."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as failure:
        missing("ipv6", str(failure))


def missing(name: str, why: str) -> None:
    """Ends a test for want of something: skipped, or failed where it is required.

    Args:
        name: What the test needs, one of those that this module knows.
        why: The problem with it.
    """
    words = f"the test needs {name} ({why}); install it: {_INSTALLED_BY[name]}"
    if name in os.environ.get(VARIABLE, "").replace(" ", "").split(","):
        pytest.fail(f"{words}; {VARIABLE} says that it must be here", pytrace=False)
    pytest.skip(words)
