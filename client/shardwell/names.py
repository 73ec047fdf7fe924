"""Which names are allowed for parameters, workers, groups and clusters, and which addresses.

The alphabet is safe in file names, logs and shells, so that nothing downstream has to escape it.
"""

from __future__ import annotations

import re

from shardwell.errors import ArgumentError

NAME_LENGTH_MAX = 128
ADDRESS_LENGTH_MAX = 300
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(what: str, name: object) -> str:
    """Returns `name` if it is allowed.

    Args:
        what: What it names, for the message ("worker_id").
        name: The candidate.

    Raises:
        ArgumentError: it is no string of 1 to 128 letters, digits, `.`, `_` or `-` that begins
            with a letter or digit.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            f"{what} must be 1 to {NAME_LENGTH_MAX} of letters, digits, '.', '_' and '-', "
            f"beginning with a letter or a digit; got {name!r:.80}"
        )
    return name


def is_address(address: str) -> bool:
    """Whether it is HOST:PORT, where HOST may be an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    return (
        len(address) <= ADDRESS_LENGTH_MAX
        and re.fullmatch(r"[^\s:;/\[\]]+|\[[^\s\[\]]+\]", host) is not None
        and re.fullmatch(r"[0-9]{1,5}", port) is not None
        and 0 < int(port) < 2**16
    )
