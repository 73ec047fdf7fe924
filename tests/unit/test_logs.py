"""Goal: a shard's log has what happened, for people or programs, and no values of variables.

Method: records as the service writes them, in either format.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from shardwell_server.logs import LogFormat, configure_logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    logger = logging.getLogger("shardwell_server")
    before = (logger.handlers, logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_has_no_values(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat
) -> None:
    configure_logs("info", log_format)

    def fail(secret: str) -> None:
        raise RuntimeError("it failed")

    try:
        fail("-".join(["do", "not", "tell"]))
    except RuntimeError:
        logging.getLogger("shardwell_server").exception("a call failed")
    log = capsys.readouterr().err
    assert "a call failed" in log
    assert "RuntimeError: it failed" in log
    assert "do-not-tell" not in log


def test_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json", shard_index=3)
    logger = logging.getLogger("shardwell_server")
    logger.debug("too little")
    logger.info("opened %s", "it", extra={"parameter": "p"})
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found.pop("timestamp").endswith("Z")
    assert found == {"event": "opened it", "level": "info", "parameter": "p", "shard_index": 3}
