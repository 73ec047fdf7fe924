"""The members of an elastic parameter or table, workers that come and go. A value object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from shardwell.errors import ArgumentError
from shardwell.specs.checks import check_number, check_whole_number
from shardwell.specs.wire_form import Record
from shardwell.v1 import types_pb2

MEMBER_COUNT_MAX = 2**12
BOUND_S_MAX = 3600.0
"""Largest bound of time in a spec."""


@dataclass(frozen=True, kw_only=True)
class Elastic(Record[types_pb2.ElasticMembers]):
    """Workers come and go: a step waits for those that are members as it is open.

    Raises:
        ArgumentError: a value is out of its range.

    Examples:
        >>> members = shardwell.Elastic(min_count=1, max_count=8)
        >>> rule = shardwell.SGD(lr=0.5)
        >>> net = client.parameter("elastic", size=3, optimizer=rule, members=members)
        >>> net.init(np.zeros(3))
        >>> net.join()  # steps wait for this worker from here on
        >>> weights = net.exchange(np.ones(3))
        >>> net.outcome.contributors
        ('w0',)
    """

    min_count: int = 1
    """The floor: no step closes with fewer gradients, so with fewer members all wait."""
    max_count: int = 64
    """Members at once, up to 4,096; one more is refused. It bounds memory and sums' scale."""
    member_return_s: float = 1.0
    """A member whose connection broke, as of a process that died, may come back for so long."""
    member_lease_s: float = 5.0
    """A member that is connected and silent, as one behind a cut cable, is lost after so long, and
    `member_return_s`."""
    reference_count: int = 0
    """The optimizer's learning rate is that of so many members: a step of n gradients has the rate
    times n / reference_count. 0: the rate does not depend on the members."""

    MESSAGE: ClassVar[Any] = types_pb2.ElasticMembers

    def __post_init__(self) -> None:
        check_whole_number("max_count", self.max_count, 1, MEMBER_COUNT_MAX)
        check_whole_number("min_count", self.min_count, 1, self.max_count)
        check_whole_number("reference_count", self.reference_count, 0, MEMBER_COUNT_MAX)
        for name in ("member_return_s", "member_lease_s"):
            value = getattr(self, name)
            check_number(name, value, low=0.0, below=BOUND_S_MAX)
            if value < 0.05:
                raise ArgumentError(f"{name} must be at least 0.05 s; got {value!r}")

    @property
    def seat_count_max(self) -> int:
        """The number of seats: members may leave a step that has their gradients."""
        return 2 * self.max_count

    @staticmethod
    def crew(worker_count: int | None, members: Elastic | None) -> dict[str, Any]:
        """The given ones of the two, as arguments of `Client.parameter`."""
        given = {"worker_count": worker_count, "members": members}
        return {name: value for name, value in given.items() if value is not None}
