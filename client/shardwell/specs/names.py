"""The allowed names of parameters, workers, groups and clusters, and addresses; ranks.

The alphabet is safe in file names, logs and shells, so that nothing downstream has to escape it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from shardwell.errors import ArgumentError

NAME_LENGTH_MAX = 128
ADDRESS_LENGTH_MAX = 300
SHARD_COUNT_MAX = 4096
RANKS_NAMED_MAX = 16
"""More ranks are counted, and not named."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(what: str, name: object) -> str:
    """Returns `name` if it is allowed; `what` names it in the message, such as "worker_id"."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            f"{what} must be 1 to {NAME_LENGTH_MAX} of letters, digits, '.', '_' and '-', "
            f"beginning with a letter or a digit; got {name!r:.80}"
        )
    return name


def neighbour(name: str, known: Iterable[str]) -> str:
    """Returns the known name that a wrong one may mean, as "; did you mean 'w'?", or nothing."""
    found = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def is_address(address: str) -> bool:
    """Returns True for HOST:PORT, where HOST may be an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    return (
        len(address) <= ADDRESS_LENGTH_MAX
        and re.fullmatch(r"[^\s:;/\[\]]+|\[[^\s\[\]]+\]", host) is not None
        and re.fullmatch(r"[0-9]{1,5}", port) is not None
        and 0 < int(port) < 2**16
    )


def parse_target(target: str) -> list[str]:
    """Returns the addresses in "host:port,host:port", in the order of the shards."""
    if not isinstance(target, str):
        kind, remedy = type(target).__name__, ""
        if isinstance(target, (list, tuple)):
            remedy = "; pass ','.join(addresses)"
        elif isinstance(getattr(target, "target", None), str):
            remedy = f"; pass the {kind}'s .target"
        raise ArgumentError(
            f"a cluster's target is text, HOST:PORT[,HOST:PORT...]; got {kind} {target!r:.80}"
            f"{remedy}"
        )
    addresses = [part.strip() for part in target.split(",")]
    for address in addresses:
        if not is_address(address):
            raise ArgumentError(
                f"a cluster's target is HOST:PORT[,HOST:PORT...] in the order of the shards; got "
                f"{address!r} in {target!r:.200}; set $SHARDWELL_SHARDS or pass target"
            )
    if not addresses or len(addresses) > SHARD_COUNT_MAX:
        raise ArgumentError(f"a target has 1 to {SHARD_COUNT_MAX} addresses; got {target!r:.200}")
    if len(set(addresses)) != len(addresses):
        raise ArgumentError(f"an address occurs twice in {target!r:.200}")
    return addresses


def format_ranks(ranks: Sequence[int]) -> str:
    """The ranks in words, such as "rank 2", "ranks 0, 1 and 5 more", or "no rank"."""
    if not ranks:
        return "no rank"
    shown = ", ".join(map(str, ranks[:RANKS_NAMED_MAX]))
    more = f" and {len(ranks) - RANKS_NAMED_MAX} more" if len(ranks) > RANKS_NAMED_MAX else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
