"""Parts of gradients of rows as they come: checked except their turn, and decoded."""

from __future__ import annotations

import math
from typing import NamedTuple

from shardwell.errors import ArgumentError
from shardwell.numerics.codec import Bytes, Float32
from shardwell.placement.rows import Ids, RowPlacement
from shardwell.specs.parameter import SAMPLE_COUNT_MAX, STEP_MAX
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.rows import RowCodec, check_ids
from shardwell_server.shard.errors import non_finite_row

PART_COUNT_MAX = 65536
"""Parts of one step on one shard."""


class Part(NamedTuple):
    """A part of a step's gradient."""

    ids: Ids
    """(n,), ascending, each of this shard."""
    gradients: Float32
    """(n, dim), its own memory."""
    header: pb.RowGradients
    peak: float
    """Largest magnitude of the gradients; infinity if one is not finite."""


class PartReader:
    """Opens parts for one table. Stateless; any thread may use it."""

    def __init__(
        self, spec: TableSpec, codec: RowCodec, placement: RowPlacement, shard_index: int
    ) -> None:
        self._spec = spec
        self._codec = codec
        self._placement = placement
        self._shard_index = shard_index
        self._fetch_context = checksum.context(checksum.Kind.ROWS_FETCH, spec.name)

    def open(self, worker_id: str, header: pb.RowGradients, payload: Bytes) -> Part:
        """Checks all of a part except its turn, and decodes it."""
        context = checksum.context(checksum.Kind.ROW_GRADIENTS, self._spec.name, worker_id)
        start = checksum.row_gradients(context, header)
        opened, gradients, peak = self._codec.take(header.rows, payload, start=start)
        _check(header)
        check_ids(opened.ids, self._placement, self._shard_index)
        if peak == math.inf and (bad := self._codec.first_non_finite(opened)) is not None:
            raise non_finite_row(self._spec, opened.ids, bad, f"gradient of {worker_id!r}")
        return Part(opened.ids, gradients, header, peak)

    def open_ids(self, fetch: pb.RowsFetch, payload: Bytes) -> Ids:
        """Returns the ids of a fetch, each of which is this shard's."""
        start = checksum.rows_fetch(self._fetch_context, fetch)
        ids = self._codec.open(
            fetch.rows, payload, start=start, with_ids=True, with_values=False
        ).ids
        check_ids(ids, self._placement, self._shard_index)
        return ids


def _check(header: pb.RowGradients) -> None:
    if header.sample_count > SAMPLE_COUNT_MAX:
        raise ArgumentError(
            f"sample_count must be at most {SAMPLE_COUNT_MAX}; got {header.sample_count}"
        )
    if header.step > STEP_MAX:
        raise ArgumentError(f"step must be at most {STEP_MAX}; got {header.step}")
    if header.part_index >= PART_COUNT_MAX - (not header.end_of_step):
        raise ArgumentError(
            f"part_index must be below {PART_COUNT_MAX}, and the last part says end_of_step; got "
            f"{header.part_index}; send larger parts"
        )
    if header.abandons and (header.rows.row_count or not header.end_of_step):
        raise ArgumentError(
            "a part that abandons a step has end_of_step and no rows; got "
            f"end_of_step={header.end_of_step} and {header.rows.row_count} rows"
        )
