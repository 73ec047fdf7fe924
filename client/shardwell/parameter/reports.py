"""The reports of one worker about a parameter: figures of steps, and a learner's progress.

Reports are sent to shard 0, one of each kind at a time, and never wait for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from shardwell.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    LimitError,
    ShardUnavailableError,
)
from shardwell.parameter.opening import ParameterOpening
from shardwell.rpc.call_scope import CallScope
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.learner import LearnerProgress
from shardwell.specs.names import check_name
from shardwell.v1 import parameter_server_pb2 as pb

_GIVE_UP_S = 10.0
_ERROR_COUNT_MAX = 10
_LOG = logging.getLogger("shardwell")


class Reports:
    """The reports that are under way, or wait for one."""

    def __init__(self, opening: ParameterOpening, calls: CallScope, channel: ShardChannel) -> None:
        self._opening = opening
        self._calls = calls
        self._channel = channel
        self._figures: Future[None] | None = None
        self._errors: set[str] = set()
        self._progress: LearnerProgress | None = None
        self._saying: Future[None] | None = None

    @property
    def are_sent(self) -> bool:
        """Returns True if no report is under way."""
        return all(call is None or call.done() for call in (self._figures, self._saying))

    def send_figures(self, step: int, figures: Mapping[str, Any]) -> None:
        """Sends figures, or leaves them out while the last ones are under way."""
        listed = [pb.Figure(name=name, value=_figure(name, each)) for name, each in figures.items()]
        if self._figures is not None and not self._figures.done():
            self._calls.check_open()
            return

        def send(attempts: Attempts) -> None:
            self._send(pb.ReportRequest(step=step, figures=listed), attempts)

        with contextlib.suppress(LimitError):  # as many calls are under way as there may be
            self._figures = self._calls.start(send, _GIVE_UP_S)
            self._figures.add_done_callback(self._note)

    def send_progress(self, progress: LearnerProgress) -> None:
        """Sends a learner's progress, after the one that is under way."""
        self._progress = progress
        if self._saying is not None and not self._saying.done():
            self._calls.check_open()
        else:
            self._say_progress()

    def _say_progress(self) -> None:
        def send(attempts: Attempts) -> None:
            progress, self._progress = self._progress, None
            if progress is not None:  # else the call before this one has said it
                request = pb.ReportRequest(
                    worker_id=self._opening.worker_id,
                    session=self._channel.session.number,
                    learner=progress.to_proto(),
                )
                self._send(request, attempts)

        def go_on(call: Future[None]) -> None:
            self._note(call)
            if self._progress is not None:
                with contextlib.suppress(ClosedError):
                    self._say_progress()

        with contextlib.suppress(LimitError):  # as many calls are under way as there may be
            self._saying = self._calls.start(send, _GIVE_UP_S)
            self._saying.add_done_callback(go_on)

    def _send(self, request: pb.ReportRequest, attempts: Attempts) -> None:
        opening, channel = self._opening, self._channel
        request.shard.CopyFrom(channel.identity)
        request.parameter, request.incarnation = opening.spec.name, opening.incarnation
        channel.call("Report", request, pb.ReportResponse, timeout_s=attempts.rest_s, **opening.of)

    def _note(self, call: Future[None]) -> None:
        error = call.exception()
        if error is None or isinstance(error, ClosedError | DeadlineError | ShardUnavailableError):
            return
        if str(error) not in self._errors and len(self._errors) < _ERROR_COUNT_MAX:
            self._errors.add(str(error))
            name = self._opening.spec.name
            _LOG.warning("reports of parameter %r are refused: %s", name, error)


def _figure(name: str, value: Any) -> float:
    check_name("figure", name)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"figure {name!r} must be a number; got {value!r:.80}") from None
