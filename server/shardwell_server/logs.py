"""Structured logs of the service's processes, on stderr: for people on a terminal, else JSON lines.

The library itself only writes to the standard logger "shardwell_server"; nothing is printed unless
a process asks for it here.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

from shardwell_server.terminal import is_plain

LogFormat = Literal["auto", "console", "json"]


def configure_logs(level: str = "info", log_format: LogFormat = "auto", **bound: str | int) -> None:
    """Sends this process's logs to stderr, as "console", "json" (an object a line) or "auto".

    Each line has `bound`, such as the shard, where several write to one place.
    """
    if log_format == "auto":
        log_format = "console" if sys.stderr.isatty() else "json"

    def bind(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**bound, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        bind,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty() and not is_plain(),
                # Not the one that shows the values of variables, which may be anything.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
        if log_format == "console"
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logger = logging.getLogger("shardwell_server")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
