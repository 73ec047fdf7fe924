"""The command that installs a package for the Python that runs this process."""

from __future__ import annotations

import shlex
import sys


def install_command(*arguments: str) -> str:
    """A line for a shell, for messages: pip of this Python, so that the package is found here.

    It does not name an extra of Shardwell's: pip would look for Shardwell itself, which may have
    been installed from a checkout or a wheel.
    """
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *arguments])
