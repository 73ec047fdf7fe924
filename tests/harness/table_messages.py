"""Messages about rows in fp32, written and read by protobuf and NumPy; no wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from fastcrc import crc32

from shardwell.v1 import table_pb2 as pb


def part(
    step: int,
    part_index: int,
    gradients: Mapping[int, Any],
    *,
    ends: bool = True,
    samples: int = 1,
    abandons: bool = False,
) -> pb.ExchangeRowsRequest:
    """A part of a step: gradients by id, which ascend."""
    values = np.array(list(gradients.values()), "<f4")
    payload = np.array(list(gradients), "<i8").tobytes() + values.tobytes()
    return pb.ExchangeRowsRequest(
        gradient=pb.RowGradients(
            rows=pb.Rows(row_count=len(gradients), crc32c=crc32.iscsi(payload)),
            step=step,
            part_index=part_index,
            end_of_step=ends,
            sample_count=samples,
            abandons=abandons,
        ),
        payload=payload,
    )


def asking(ids: list[int], min_version: int = 0) -> pb.ExchangeRowsRequest:
    """A question for rows."""
    payload = np.array(ids, "<i8").tobytes()
    rows = pb.Rows(row_count=len(ids), crc32c=crc32.iscsi(payload))
    return pb.ExchangeRowsRequest(
        fetch=pb.RowsFetch(rows=rows, min_version=min_version), payload=payload
    )


def answered(message: bytes, dim: int) -> tuple[np.ndarray, int]:
    """The rows of an answer, and their version."""
    answer = pb.ExchangeRowsResponse.FromString(message)
    assert answer.rows.crc32c == crc32.iscsi(answer.payload)
    values = np.frombuffer(answer.payload, "<f4").reshape(answer.rows.row_count, dim)
    return values, answer.version
