"""Where the whole crew stands, worked out from what its members told. Pure but for its input."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardwell_server.demo.workers import Member

_WINDOW_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Standing:
    """All workers together at one moment."""

    ready_count: int
    """Workers that have connected."""
    step: int
    """Steps that every worker has made."""
    step_sum: int
    """Steps of all workers together."""
    loss: float | None
    """Mean of the workers' latest; None before the first step."""
    first_loss: float | None
    """Mean of their first steps'."""
    sent_bytes: int
    received_bytes: int
    sent_value_bytes: int
    """What was sent, as float32."""
    bytes_per_s: float
    """Both ways, of late."""
    training_s: float
    """From the first step that was reported to the latest."""

    @property
    def steps_per_s(self) -> float:
        """Of each worker, over the whole training; the first step only starts the clock."""
        return (self.step - 1) / self.training_s if self.step > 1 and self.training_s > 0 else 0.0

    @property
    def codec_ratio(self) -> float:
        """Bytes that float32 would have taken, for each byte sent."""
        return self.sent_value_bytes / self.sent_bytes if self.sent_bytes else 0.0


class Observer:
    """Makes standings, and remembers the last two seconds for the rate."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._window: deque[tuple[float, int]] = deque()

    def look(self, now_s: float) -> Standing:
        """Where all stand now; `now_s` is monotonic time."""
        members = self._members
        reports = [member.latest for member in members if member.latest is not None]
        sent = sum(report.sent_bytes for report in reports)
        received = sum(report.received_bytes for report in reports)
        self._window.append((now_s, sent + received))
        while self._window[0][0] < now_s - _WINDOW_S:
            self._window.popleft()
        then_s, earlier = self._window[0]
        started_s = [member.first_step_s for member in members if member.first_step_s is not None]
        return Standing(
            ready_count=len(reports),
            step=min(member.step for member in members),
            step_sum=sum(member.step for member in members),
            loss=_mean([member.loss for member in members]),
            first_loss=_mean([member.first_loss for member in members]),
            sent_bytes=sent,
            received_bytes=received,
            sent_value_bytes=sum(report.sent_value_bytes for report in reports),
            bytes_per_s=(sent + received - earlier) / (now_s - then_s) if now_s > then_s else 0.0,
            training_s=max(m.heard_s for m in members) - min(started_s) if started_s else 0.0,
        )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
