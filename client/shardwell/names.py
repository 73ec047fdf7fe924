"""Which names are allowed for parameters, workers and clusters.

The alphabet is safe in file names, logs and shells, so that nothing downstream has to escape it.
"""

from __future__ import annotations

import re

from shardwell.errors import ArgumentError

NAME_LENGTH_MAX = 128
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
