"""The reports of learners in outer training, for people: no step depends on them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from shardwell.specs.checks import check_number, check_whole_number
from shardwell.specs.wire_form import Record
from shardwell.v1 import parameter_server_pb2 as pb

_COUNT_MAX = 2**62
_SECONDS_END = 1e12
"""All times are below it; 30,000 years."""


@dataclass(frozen=True, kw_only=True)
class LearnerProgress(Record[pb.LearnerProgress]):
    """The progress of a learner: its steps, its bytes and its waits; checked when made.

    Raises:
        ArgumentError: a number is negative, not finite, or too large.

    Examples:
        >>> with shardwell.Outer(
        ...     client, "progress", tensors={"a": (3,)}, sync_every=2, fragments=1
        ... ) as outer:
        ...     weights = outer.init({"a": np.zeros(3)})
        ...     taken = outer.after_step(weights, sample_count=32)
        ...     outer.progress.inner_steps, outer.progress.sample_count
        (1, 32)
    """

    inner_steps: int = 0
    """Steps that it has made by itself; what it went on from, among them."""
    sample_count: int = 0
    """What it was trained on since it began, in the unit that all learners share."""
    offered_count: int = 0
    """Outer gradients that it has offered, over all fragments."""
    sent_bytes: int = 0
    """Bytes of outer gradients and first weights, encoded."""
    received_bytes: int = 0
    """Bytes of weights, encoded."""
    hidden_s: float = 0.0
    """Seconds that offers travelled, or waited for other learners, while training went on."""
    waited_s: float = 0.0
    """Seconds that takes have waited."""
    overdue_count: int = 0
    """Offers whose result had not come in time."""
    kept_count: int = 0
    """Takes at which it has kept work that the shards had not counted."""

    MESSAGE: ClassVar[Any] = pb.LearnerProgress

    def __post_init__(self) -> None:
        for each in fields(self):
            what, value = f"a learner's {each.name}", getattr(self, each.name)
            if each.name.endswith("_s"):
                check_number(what, value, below=_SECONDS_END)
            else:
                check_whole_number(what, value, 0, _COUNT_MAX)
