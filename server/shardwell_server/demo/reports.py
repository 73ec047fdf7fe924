"""The reports of a worker while it trains: one JSON object a line on its standard output."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwell import Traffic
from shardwell.errors import ShardwellError


class DemoError(ShardwellError):
    """The demo can't begin or go on: scikit-learn is missing, or a worker or a shard has ended."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The progress of a worker."""

    step: int
    loss: float | None = None
    """Mean over its steps since the report before; None before the first step."""
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_value_bytes: int = 0
    contributors: Sequence[str] = ()
    """Workers whose gradients its last step has, where steps may close without a worker."""
    outer: Mapping[str, float] = field(default_factory=dict)
    """The steps whose results it took, `outer_steps`, and the seconds `waited_s` and `hidden_s`."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """The measures after that step, on held-out data; empty: none."""

    def to_line(self) -> str:
        """Returns one line of JSON, without the newline."""
        return json.dumps(dataclasses.asdict(self))


def error_line(message: str) -> str:
    """Returns the line of a worker that can't go on."""
    return json.dumps({"error": message})


def parse_line(line: str) -> Report | str:
    """Returns a report, or the message of an error; ValueError: it is neither."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"no report: {line:.80}")
    if "error" in fields:
        return str(fields["error"])
    try:
        fields["contributors"] = tuple(fields.get("contributors", ()))
        return Report(**fields)
    except TypeError as error:
        raise ValueError(f"no report: {line:.80}") from error


class Reporter:
    """Gathers losses and reports now and then: the first step, the last, and between them."""

    def __init__(
        self, report: Callable[[Report], None], traffic: Traffic, *, interval_s: float
    ) -> None:
        self._report = report
        self._traffic = traffic
        self._interval_s = interval_s
        self._losses: list[float] = []
        self._due_s = 0.0

    def begin(self, step: int) -> None:
        """Reports that training goes on at `step`."""
        self._report(Report(step=step))

    def add(
        self,
        step: int,
        loss: float,
        *,
        last: bool,
        measure: Callable[[], Mapping[str, float]] | None = None,
        **more: Any,
    ) -> None:
        """Notes `step` steps, the last with `loss`, and `more` of a `Report`; measures when due."""
        self._losses.append(loss)
        now_s = time.monotonic()
        if last or now_s >= self._due_s:
            self._due_s = now_s + self._interval_s
            self._report(
                Report(
                    step=step,
                    loss=sum(self._losses) / len(self._losses),
                    sent_bytes=self._traffic.sent_bytes,
                    received_bytes=self._traffic.received_bytes,
                    sent_value_bytes=self._traffic.sent_value_bytes,
                    measures={} if measure is None else measure(),
                    **more,
                )
            )
            self._losses.clear()
