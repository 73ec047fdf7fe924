"""Slurm's short way to write many hosts: `node[01-04,07],gpu3`. Pure text.

Not a full expansion: a group needs to know where its rank 0 runs, which is the first host, so the
work does not grow with the number of hosts.
"""

from __future__ import annotations

import re

from shardwell.errors import ArgumentError

HOSTLIST_LENGTH_MAX = 65536
"""Characters; thousands of hosts that have no pattern in common fit."""
_RANGES = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_ENTRY = re.compile(rf"(?:[A-Za-z0-9_.-]+|{_RANGES})+")
_RANGES_FIRST = re.compile(r"\[([0-9]+)[^\]]*\]")


def first_host(hostlist: str) -> str:
    """The first host of a list in Slurm's syntax: "node01" of "node[01-04,07],gpu3".

    An entry may have several brackets ("rack[1-2]n[01-16]"), of which each stands for numbers and
    ranges with leading zeros kept. Brackets within brackets do not occur in Slurm's output.

    Raises:
        ArgumentError: it is empty, too long, or the first entry is not of that syntax.
    """
    if len(hostlist) > HOSTLIST_LENGTH_MAX:
        raise ArgumentError(
            f"a list of hosts has at most {HOSTLIST_LENGTH_MAX} characters; got {len(hostlist)}"
        )
    entry = _ENTRY.match(hostlist)
    if entry is None or hostlist[entry.end() : entry.end() + 1] not in ("", ","):
        raise ArgumentError(
            f"a list of hosts is like 'node1,node2' or 'node[01-04,07],gpu3'; got {hostlist!r:.200}"
        )
    return _RANGES_FIRST.sub(r"\1", entry.group())
