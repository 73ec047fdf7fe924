"""Embedding layers whose weight lives in a table: `Embedding` and `EmbeddingBag`.

States of a layer: *idle*; *looked up*, when a forward pass has fetched rows whose gradients are to
come; *gathered*, when a backward pass has brought some; *owed*, when a push of them failed. A push
is one step of the table. Invariants: what was owed is sent again, with the same values, before
anything else of the layer joins the step; rows of a synchronous table are those after all steps
that this worker has pushed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from shardwell.errors import ArgumentError, NonFiniteError
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids, RowPlacement
from shardwell.table.batch import RowBatch, as_ids
from shardwell.table.table import Table

BagModeName = Literal["sum", "mean", "max"]


class _Lookup(NamedTuple):
    """Rows of one forward pass."""

    rows: torch.Tensor
    """(u, dim) by distinct id, ascending; with padding, one more, of zeros."""
    places: torch.Tensor
    """Of the ids' shape: the row of each."""
    padding_place: int | None


class _Push(NamedTuple):
    """Row gradients of one step."""

    step: int
    ids: Ids
    gradients: Float32
    sample_count: int


class TableModule(torch.nn.Module):
    """What looks rows up in a table and pushes their gradients.

    Args:
        table: Made by `Client.table`. It stays the caller's to close.
        padding_idx: Ids that stand for nothing: their rows are zeros and have no gradient. Need not
            be an id of the table.
    """

    def __init__(self, table: Table, *, padding_idx: int | None) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise ArgumentError(f"table must be made by Client.table; got {table!r}")
        self.table = table
        """Where the weight lives: `next_step`, `version`, `set_learning_rate`, `abandon_step`."""
        self.num_embeddings = table.row_count
        """See torch; None: any 64-bit integer is an id."""
        self.embedding_dim = table.dim
        """See torch."""
        self.padding_idx = padding_idx
        self.sample_count = 1
        """Weight of this worker's next push in the mean, such as the number of samples."""
        self.timeout_s: float | None = None
        """Of each pass's call, which may be set; None: the client's."""
        self._is_paused = False
        self._is_looked_up = False
        self._pass = -1
        """The last backward pass, by torch's number, that brought gradients."""
        self._arriving: list[tuple[Ids, torch.Tensor]] = []
        """What it brought, until it ends; of one that failed, nothing counts."""
        self._gathered: list[tuple[Ids, torch.Tensor]] = []
        """What passes brought that have ended."""
        self._owed: _Push | None = None
        self._next_ids: Ids | None = None

    def extra_repr(self) -> str:
        """See torch."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table!r}{padding}"

    def prefetch(self, ids: Any) -> None:
        """Fetches rows in the background, for the next forward pass of the same ids.

        Between forward and backward it begins when the gradients have been pushed, and the rows
        are those after that step, as without it.

        Args:
            ids: Of the next batch; see `forward`.

        Raises:
            ArgumentError: the ids can't be used.
        """
        self._next_ids = self._batch(ids)[0].distinct.ids
        if not self._is_looked_up:
            self._prefetch()

    def push(self) -> None:
        """Ends this worker's step with the gradients that have come: none, some, or those owed.

        A backward pass does it. It is for what does not: after `no_sync`, after an error, and for a
        step in which this worker has looked up nothing, but others wait for it.

        Raises:
            ShardwellError: as `Table.put_row_gradients`. The step is still open: the next call, or
                the next pass, sends the same again, which counts once.
        """
        if not self._settle() or self._gathered:
            self._push_gathered()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets gradients of batches accumulate: nothing is pushed in the block.

        The backward pass of the last batch comes after it. `ServerOptimizer.no_sync` does it for
        all layers of its model.
        """
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    # Rows in.

    def _look_up(self, ids: Any) -> _Lookup:
        """Fetches the rows of some ids, and follows their gradients."""
        self._settle()
        batch, is_id = self._batch(ids)
        distinct = batch.distinct.ids
        is_padded = not is_id.all()
        rows = np.empty((distinct.size + is_padded, self.table.dim), np.float32)
        rows[distinct.size :] = 0
        self.table.get_rows(
            distinct,
            out=rows[: distinct.size],
            min_version=self._min_version(),
            timeout_s=self.timeout_s,
        )
        places = np.full(is_id.shape, distinct.size)
        places[is_id] = batch.inverse
        device = ids.device if isinstance(ids, torch.Tensor) else None
        leaf = torch.from_numpy(rows).to(device)
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            leaf.register_hook(lambda gradient: self._gather(distinct, gradient))
            self._is_looked_up = True
        where = torch.from_numpy(places).to(device)
        return _Lookup(leaf, where, distinct.size if is_padded else None)

    def _batch(self, ids: Any) -> tuple[RowBatch, Any]:
        """The ids that stand for rows, and which those are."""
        given = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
        is_id = np.ones(given.shape, np.bool_)
        if self.padding_idx is not None:
            is_id = given != self.padding_idx
        flat, shape = as_ids(given[is_id], self.table.row_count)
        return RowBatch(flat, shape, RowPlacement(self.table.row_count, 1)), is_id

    def _min_version(self) -> int:
        """The steps that rows must have seen; rows of a cache may be older, as it allows."""
        return 0 if self.table.caching[0] else self.table.next_step

    def _prefetch(self) -> None:
        ids, self._next_ids = self._next_ids, None
        if ids is not None:
            self.table.prefetch_rows(ids, min_version=self._min_version())

    # Gradients out.

    def _gather(self, ids: Ids, gradient: torch.Tensor) -> None:
        """Called by backward for each lookup; the first call asks for another at the end."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass, self._arriving = current, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        own = gradient.detach()[: ids.size].to("cpu", torch.float32, copy=True)
        self._arriving.append((ids, own))

    def _end_backward(self) -> None:
        self._gathered += self._arriving
        self._arriving = []
        if self._is_paused:
            self._prefetch()
        else:
            self._settle()
            self._push_gathered()

    def _push_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        ids = np.concatenate([np.empty(0, np.int64), *[ids for ids, _ in gathered]])
        rows = [gradient.numpy() for _, gradient in gathered]
        gradients = np.concatenate([np.empty((0, self.table.dim), np.float32), *rows])
        self._owed = _Push(self.table.next_step, ids, gradients, self.sample_count)
        self._is_looked_up = False
        self._settle()

    def _settle(self) -> bool:
        """Sends what is owed; returns whether something was.

        Not, if the step is over: it was abandoned, or has ended all the same.
        """
        if self._owed is None or self._owed.step != self.table.next_step:
            self._owed = None
            return False
        try:
            self.table.put_row_gradients(
                self._owed.ids,
                self._owed.gradients,
                sample_count=self._owed.sample_count,
                timeout_s=self.timeout_s,
            )
        except (ArgumentError, NonFiniteError):  # nothing was sent
            self._owed = None
            raise
        self._owed = None
        self._prefetch()
        return True


class Embedding(TableModule):
    """`torch.nn.Embedding` whose weight is a table's rows.

    vectors = shardwell.torch.Embedding(client.table("users", row_count=10**9, dim=64, ...))
    loss_fn(head(vectors(ids)), targets).backward()  # pushes the gradients of the rows

    A forward pass fetches the rows of its batch, each once; a backward pass pushes their gradients
    as one step of the table, in which all workers take part if it is synchronous. It has no
    parameters: `state_dict` and optimizers know nothing of it, checkpoints of the cluster do.
    """

    def __init__(self, table: Table, *, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx=padding_idx)

    def forward(self, ids: Any) -> torch.Tensor:
        """The rows of ids. Blocks until they have come.

        Args:
            ids: Integers of any shape, on any device.

        Returns:
            (*ids.shape, dim) float32, on the device of the ids.

        Raises:
            ArgumentError: the ids can't be used; names the first.
            ShardwellError: as `Table.get_rows`; or as `push`, of gradients owed.
        """
        found = self._look_up(ids)
        return torch.nn.functional.embedding(found.places, found.rows, found.padding_place)


class EmbeddingBag(TableModule):
    """`torch.nn.EmbeddingBag` whose weight is a table's rows; see `Embedding`.

    Args:
        table: See `Embedding`.
        mode: "sum", "mean" or "max" of a bag's rows.
        include_last_offset: Whether offsets end with the number of ids.
        padding_idx: See `Embedding`; such ids count in no bag.
    """

    def __init__(
        self,
        table: Table,
        *,
        mode: BagModeName = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(table, padding_idx=padding_idx)
        if mode not in ("sum", "mean", "max"):
            raise ArgumentError(f"mode must be 'sum', 'mean' or 'max'; got {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: Any,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum, mean or maximum of each bag's rows. Blocks until they have come.

        Args:
            ids: (bags, ids of a bag), or (n,) with offsets. Integers, on any device.
            offsets: (bags,): where each bag begins in (n,) ids.
            per_sample_weights: Of the ids' shape, with "sum": factors of the rows.

        Returns:
            (bags, dim) float32, on the device of the ids.

        Raises:
            ArgumentError, ShardwellError: as `Embedding.forward`.
        """
        found = self._look_up(ids)
        return torch.nn.functional.embedding_bag(
            found.places,
            found.rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=found.padding_place,
        )
