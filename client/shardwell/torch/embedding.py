"""Embedding layers whose weight lives in a table: `Embedding` and `EmbeddingBag`.

A backward pass brings gradients of rows to its layers, and ends by pushing each layer's: one step
of its table. States of what was brought: *arriving*, until the pass has ended (of one that fails,
nothing counts); *gathered*, under `no_sync`; *queued*, as one step, until the table has counted it.
Invariants: what all layers of a pass have brought is queued before any of it is pushed; steps leave
in order, each with the same values however often it is sent; rows of a synchronous table are those
after all steps that this worker has pushed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch

from shardwell.errors import ArgumentError, LimitError, NonFiniteError, ShardwellError
from shardwell.numerics.arguments import check_integer
from shardwell.numerics.codec import Float32
from shardwell.placement.rows import Ids, RowPlacement
from shardwell.process.connected import Connected
from shardwell.specs.parameter import SAMPLE_COUNT_MAX
from shardwell.table.batch import RowBatch, as_ids
from shardwell.table.table import Table

_LOG = logging.getLogger("shardwell")

BagModeName = Literal["sum", "mean", "max"]


class _Part(NamedTuple):
    ids: Ids
    gradients: torch.Tensor


@dataclass
class _Push:
    ids: Ids
    gradients: Float32
    sample_count: int
    step: int | None = None


_PASS_COUNT_MAX = 16
"""Backward passes that may be under way at once; of those that failed, torch does not tell."""


class _Passes:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._brought: OrderedDict[int, dict[TableModule, list[_Part]]] = OrderedDict()
        self._dropped: set[int] = set()
        """Passes of which no more is kept, as they have probably failed."""

    def bring(self, layer: TableModule, part: _Part) -> None:
        """Notes a pass's gradients; the first has torch call `_end` after the pass."""
        number = torch._C._current_graph_task_id()
        with self._lock:
            if number in self._dropped:
                return
            is_new = number not in self._brought
            self._brought.setdefault(number, {}).setdefault(layer, []).append(part)
            while len(self._brought) > _PASS_COUNT_MAX:
                self._dropped.add(self._brought.popitem(last=False)[0])
        if is_new:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(functools.partial(self._end, number))

    def _end(self, number: int) -> None:
        """Raises the first error; the other layers' gradients are pushed all the same."""
        with self._lock:
            brought = self._brought.pop(number, {})
            is_dropped = number in self._dropped
            self._dropped.discard(number)
        if is_dropped:
            raise LimitError(
                f"this backward pass's gradients of embeddings were dropped: {_PASS_COUNT_MAX} "
                "others began before it ended; run fewer at once, and this one again"
            )
        errors: list[Exception] = []
        for act in (TableModule._gather, TableModule._push_if_due):
            for layer, parts in brought.items():
                try:
                    act(layer, parts)
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]


_passes = _Passes()
"""Of this process. Global, as torch's passes are: after an error at the end of one torch does
nothing more there, so that all layers' ends must be one."""


class TableModule(Connected, torch.nn.Module):
    """A layer that looks rows up in a table and pushes their gradients.

    Args:
        table: Made by `Client.table`. It stays the caller's to close.
        padding_idx: Ids that stand for nothing: their rows are zeros and have no gradient. Need not
            be an id of the table.

    A copy, as of `copy.deepcopy` or `AveragedModel`, looks up rows of the same table, and is read
    only: a gradient that comes to it is an error. Pickling is refused.
    """

    _elsewhere = (
        "keep model.state_dict() instead, and make the layer in the other process, over the table "
        "that a client opens there"
    )

    def __init__(self, table: Table, *, padding_idx: int | None) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise ArgumentError(f"table must be made by Client.table; got {table!r}")
        self.table = table
        """Where the weight lives: `next_step`, `version`, `set_learning_rate`, `abandon_step`."""
        self.num_embeddings = table.row_count
        """See torch; None: any 64-bit integer is an id."""
        self.embedding_dim = table.dim
        """Elements of an embedding vector, as in torch."""
        self.padding_idx = padding_idx
        self.sample_count = 1
        """Weight of this worker's next push in the mean, such as the number of samples."""
        self.timeout_s: float | None = None
        """Bound of each pass's call, which may be set; None: the client's."""
        self.is_read_only = False
        """True if it is a copy of another layer, which alone trains the rows."""
        self._start()

    def _start(self) -> None:
        self._is_paused = False
        self._is_looked_up = False
        self._lock = threading.RLock()
        """Guards what follows."""
        self._gathered: list[_Part] = []
        self._queued: deque[_Push] = deque()
        self._next_ids: Ids | None = None

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A layer over the same table, which only reads: one step has one push."""
        made = type(self).__new__(type(self))
        torch.nn.Module.__init__(made)
        for attribute, value in vars(self).items():
            if attribute not in ("table", "_lock", "_gathered", "_queued"):
                made.__dict__[attribute] = copy.deepcopy(value, memo)
        made.table, made.is_read_only = self.table, True
        made._start()
        _LOG.info(
            "a copy of %s(%r) reads the same table, and does not train it",
            type(self).__name__,
            self.table,
        )
        return made

    def extra_repr(self) -> str:
        """The words in `repr`."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        read_only = ", read only: a copy" if self.is_read_only else ""
        return f"{self.table!r}{padding}{read_only}"

    def prefetch(self, ids: Any) -> None:
        """Fetches rows in the background, for the next forward pass of the same ids.

        Between forward and backward it begins when the gradients have been pushed, and the rows
        are those after that step, as without it.

        Args:
            ids: Ids of the next batch; see `forward`.
        """
        self._next_ids = self._batch(ids)[0].distinct.ids
        if not self._is_looked_up:
            self._prefetch()

    def push(self) -> None:
        """Ends this worker's step with the gradients that have come: none, some, or those owed.

        A backward pass does it. It is for what does not: after `no_sync`, after an error, and for a
        step in which this worker has looked up nothing, but others wait for it.
        """
        self._check_trains()
        with self._lock:
            if self._gathered or not self._queued:
                self._queue()
            self._send()

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

    def _look_up(self, ids: Any) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Returns rows by distinct id, ascending, the row of each of the ids, and that of padding.

        The row of padding is behind the others, and of zeros.
        """
        self._send()
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
            is_nested = torch._C._current_graph_task_id() != -1
            leaf.register_hook(functools.partial(self._bring, distinct, is_nested))
            self._is_looked_up = not self.is_read_only
        where = torch.from_numpy(places).to(device)
        return leaf, where, distinct.size if is_padded else None

    def _batch(self, ids: Any) -> tuple[RowBatch, Any]:
        given = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
        is_id = np.ones(given.shape, np.bool_)
        if self.padding_idx is not None:
            is_id = given != self.padding_idx
        flat, shape = as_ids(given[is_id], self.table.row_count)
        return RowBatch(flat, shape, RowPlacement(self.table.row_count, 1)), is_id

    def _min_version(self) -> int:
        return 0 if self.table.caching[0] else self.table.next_step

    def _prefetch(self) -> None:
        ids, self._next_ids = self._next_ids, None
        if ids is not None:
            with contextlib.suppress(ShardwellError):  # the lookup says so, if it is to be said
                self.table.prefetch_rows(ids, min_version=self._min_version())

    # Gradients out.

    def _check_trains(self) -> None:
        if self.is_read_only:
            raise ArgumentError(
                f"this layer is a copy of one over table {self.table.name!r}, and only reads its "
                "rows; run it under torch.no_grad(), train the layer that it was copied from, or "
                f"make another: shardwell.torch.{type(self).__name__}(table)"
            )

    def _bring(self, ids: Ids, is_nested: bool, gradient: torch.Tensor) -> None:
        self._check_trains()
        if is_nested:  # of the pass inside it, which would be a step of its own
            raise ArgumentError(
                f"rows of table {self.table.name!r} are looked up inside a reentrant checkpoint; "
                "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        own = gradient.detach()[: ids.size].to("cpu", torch.float32, copy=True)
        _passes.bring(self, _Part(ids, own))

    def _gather(self, parts: list[_Part]) -> None:
        with self._lock:
            self._gathered += parts
            self._is_looked_up = False
            if not self._is_paused:
                self._queue()

    def _push_if_due(self, parts: list[_Part]) -> None:
        with self._lock:
            self._send()
            self._prefetch()

    def _queue(self) -> None:
        """Makes a step of what is gathered; the lock is held."""
        count = check_integer("sample_count", self.sample_count, 0, SAMPLE_COUNT_MAX)
        ids = [np.empty(0, np.int64), *[part.ids for part in self._gathered]]
        rows = [part.gradients.numpy() for part in self._gathered]
        rows.insert(0, np.empty((0, self.table.dim), np.float32))
        self._queued.append(_Push(np.concatenate(ids), np.concatenate(rows), count))
        self._gathered = []

    def _send(self) -> None:
        """Pushes the queued steps in order, except one that was abandoned or has ended already."""
        with self._lock:
            while self._queued:
                push = self._queued[0]
                if push.step is None:
                    push.step = self.table.next_step
                if push.step == self.table.next_step:
                    self._put(push)
                self._queued.popleft()

    def _put(self, push: _Push) -> None:
        try:
            self.table.put_row_gradients(
                push.ids,
                push.gradients,
                sample_count=push.sample_count,
                timeout_s=self.timeout_s,
            )
        except (ArgumentError, NonFiniteError):  # it can't be sent again, either
            self._queued.popleft()
            if self.table.is_step_begun:  # a shard refuses what others have counted
                self.table.abandon_step(timeout_s=self.timeout_s)
            raise


class Embedding(TableModule):
    """A `torch.nn.Embedding` whose weight is a table's rows.

    vectors = shardwell.torch.Embedding(client.table("users", row_count=10**9, dim=64, ...))
    loss_fn(head(vectors(ids)), targets).backward()  # pushes the gradients of the rows

    A forward pass fetches the rows of its batch, each once; a backward pass pushes their gradients
    as one step of the table, in which all workers take part if it is synchronous. It has no
    parameters: `state_dict` and optimizers know nothing of it, checkpoints of the cluster do.

    Examples:
        >>> rule = shardwell.Adagrad(lr=0.1)
        >>> table = client.table("torch_users", row_count=None, dim=4, optimizer=rule)
        >>> users = shardwell.torch.Embedding(table)
        >>> users(torch.tensor([7, 123_456])).sum().backward()  # pushes the rows' gradients
        >>> table.row_ids()
        array([     7, 123456])
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
        rows, places, padding_place = self._look_up(ids)
        return torch.nn.functional.embedding(places, rows, padding_place)


class EmbeddingBag(TableModule):
    """A `torch.nn.EmbeddingBag` whose weight is a table's rows; see `Embedding`.

    Args:
        table: See `Embedding`.
        mode: "sum", "mean" or "max" of a bag's rows.
        include_last_offset: Whether offsets end with the number of ids.
        padding_idx: See `Embedding`; such ids count in no bag.

    Examples:
        >>> rule = shardwell.Adagrad(lr=0.1)
        >>> table = client.table("torch_words", row_count=None, dim=4, optimizer=rule)
        >>> words = shardwell.torch.EmbeddingBag(table, mode="mean")
        >>> words(torch.tensor([[1, 2, 3], [4, 5, 6]])).shape
        torch.Size([2, 4])
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
            per_sample_weights: Factors of the rows, of the ids' shape, with "sum".

        Returns:
            (bags, dim) float32, on the device of the ids.

        Raises:
            ArgumentError, ShardwellError: as `Embedding.forward`.
        """
        rows, places, padding_place = self._look_up(ids)
        return torch.nn.functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding_place,
        )
