"""Messages about rows in fp32, written and read by protobuf and NumPy; no wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.wire_client import crc as wire_crc
from shardwell.v1 import table_pb2 as pb


def part(
    step: int,
    part_index: int,
    gradients: Mapping[int, Any],
    *,
    ends: bool = True,
    samples: int = 1,
    abandons: bool = False,
    table: str = "t",
    worker: str = "w0",
) -> pb.ExchangeRowsRequest:
    """A part of a worker's step: gradients by id, which ascend."""
    values = np.array(list(gradients.values()), "<f4")
    payload = np.array(list(gradients), "<i8").tobytes() + values.tobytes()
    message = pb.ExchangeRowsRequest(
        gradient=pb.RowGradients(
            rows=pb.Rows(row_count=len(gradients)),
            step=step,
            part_index=part_index,
            end_of_step=ends,
            sample_count=samples,
            abandons=abandons,
        ),
        payload=payload,
    )
    return wire_crc.seal(message, wire_crc.ROW_GRADIENTS, table, worker)


def asking(ids: list[int], min_version: int = 0, table: str = "t") -> pb.ExchangeRowsRequest:
    """A question for rows."""
    payload = np.array(ids, "<i8").tobytes()
    rows = pb.Rows(row_count=len(ids))
    message = pb.ExchangeRowsRequest(
        fetch=pb.RowsFetch(rows=rows, min_version=min_version), payload=payload
    )
    return wire_crc.seal(message, wire_crc.ROWS_FETCH, table)


def answered(message: bytes, dim: int, ids: list[int], table: str = "t") -> tuple[np.ndarray, int]:
    """The rows of an answer to a question for `ids`, and their version."""
    answer = pb.ExchangeRowsResponse.FromString(message)
    asked = np.array(ids, "<i8").tobytes()
    assert wire_crc.fits(answer, wire_crc.ROWS_ANSWER, table, asked)
    values = np.frombuffer(answer.payload, "<f4").reshape(answer.rows.row_count, dim)
    return values, answer.version
