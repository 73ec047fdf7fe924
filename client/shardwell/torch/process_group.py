"""A process group for `torch.distributed`, in Python: `init_process_group("shardwell")`.

Ranks meet by torch's store (meeting.py), and join a group at an address of rank 0's machine.
Float32, and what becomes it without loss, is reduced by the group's collectives, in its codec;
other dtypes, and reductions that a group does not have, are gathered as bytes and reduced by torch
in the order of the ranks: exact, and as many times the bytes as there are ranks.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwell.errors import ArgumentError, CollectiveMismatchError, DeadlineError
from shardwell.group.group import Group
from shardwell.group.join import join_group
from shardwell.numerics.reduction import ReductionName
from shardwell.process.environment import variable
from shardwell.torch.buffers import put_back, word_count, words_of
from shardwell.torch.meeting import StoreMeeting

BACKEND_NAME = "shardwell"
_NO_MESSAGES = (
    f"backend {BACKEND_NAME!r} has no send and recv; pass them a group of another backend, such as "
    f"torch.distributed.new_group(backend='gloo')"
)
_FOR_EVER = timedelta(0)
"""As torch says it; the group's own deadlines hold."""
_LATEST_COUNT = 4
"""All-reduces that are kept when they have ended, with their tensors."""
_TELLING_COUNT_MAX = 64
"""Futures whose callbacks run at once: as many as a group has calls under way."""
CODEC_VARIABLE = "SHARDWELL_CODEC"
"""The codec of values that are reduced: fp32 (default), fp16 or bf16."""
STRATEGY_VARIABLE = "SHARDWELL_STRATEGY"
"""ring (default), tree, tree(arity=3) or centralized."""
_AS_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)
_REDUCTIONS: tuple[tuple[Any, ReductionName], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
)
_BY_TORCH: tuple[tuple[Any, Callable[..., torch.Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
)


class _Work(dist.Work):
    """An all-reduce under way: torch's own wrapper of a future would keep its error to itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self._ended: Future[None] = Future()
        self._told: torch.futures.Future[None] = torch.futures.Future()
        # One that is chained can fail; the result of another is taken for tensors by DDP, whatever
        # it is, and an exception is none.
        self._future = self._told.then(self._outcome)

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def tell(self) -> None:
        """Ends its future as it has ended itself; what is chained to that runs here."""
        self._told.set_result(None)

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        self._ended.result()
        return [self._tensor]

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        timeout_s = timeout.total_seconds()
        try:
            self._ended.result(timeout_s or None)
        except TimeoutError:
            if self._ended.done():
                raise  # its own error
            raise DeadlineError(
                f"an all-reduce has not ended within {timeout_s:g} s; it goes on: wait again"
            ) from None
        self._future.wait()  # DDP.join reads it at once
        return True

    def is_completed(self) -> bool:
        return self._ended.done()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The tensor's future; torch makes a RuntimeError of an error, with its name and text."""
        return self._future

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]


class ShardwellProcessGroup(dist.ProcessGroup):
    """A process group of torch over a group, whose errors calls or `Work.wait` raise."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        # C++ callers hold no reference to what Python adds to a Work: it is kept until it has
        # ended, and they have asked for its future.
        self._under_way: set[_Work] = set()
        self._latest: deque[_Work] = deque(maxlen=_LATEST_COUNT)
        # A callback of a future may wait for another all-reduce, as PowerSGD's does: so it must
        # not hold up the group's own thread.
        self._telling = ThreadPoolExecutor(_TELLING_COUNT_MAX, "shardwell-torch")
        self._name = self._description = ""

    # Torch's own class keeps these with a backend, which a group in Python has not.

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """The backend's name."""
        return BACKEND_NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802 (torch's name)
        """Sets the name by which torch finds the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 (torch's name)
        """The group's name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 (torch's name)
        """Keeps the group's description."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 (torch's name)
        """The group's description."""
        return self._description

    def __repr__(self) -> str:
        return f"ShardwellProcessGroup({self.group!r})"

    # Reducing.

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Serves `torch.distributed.all_reduce`."""
        (tensor,) = tensors
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if tensor.is_sparse:
            self._sum_sparse(tensor, op)
            return _done([tensor])
        name = _reduction(op, tensor)
        if name is None:
            _put(_reduced(self._gathered(tensor), op), tensor)
            return _done([tensor])
        values = _float32(tensor)
        if opts is not None and not getattr(opts, "asyncOp", True):
            self.group.all_reduce(values.numpy(), name)
            _put(values, tensor)
            return _done([tensor])
        work = _Work(tensor)
        self._under_way.add(work)
        self._latest.append(work)

        def done(call: Future[None]) -> None:
            error = call.exception()
            if error is None:
                _put(values, tensor)
            work.end(error)
            try:
                self._telling.submit(tell)
            except RuntimeError:  # the interpreter ends, and takes no more
                tell()

        def tell() -> None:
            work.tell()
            self._under_way.discard(work)

        self.group.all_reduce_async(values.numpy(), name).add_done_callback(done)
        return work

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """All-reduces several tensors, one after another."""
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        for work in works:
            work.wait()
        return _done(list(tensors))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Serves `torch.distributed.reduce`."""
        (tensor,) = tensors
        name = _reduction(opts.reduceOp, tensor)
        if name is not None:
            values = _float32(tensor)
            self.group.reduce(values.numpy(), opts.rootRank, name)
            if self.rank() == opts.rootRank:
                _put(values, tensor)
        else:
            gathered = self._gathered(tensor)
            if self.rank() == opts.rootRank:
                _put(_reduced(gathered, opts.reduceOp), tensor)
        return _done([tensor])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Serves `torch.distributed.reduce_scatter_tensor`."""
        name = _reduction(opts.reduceOp, tensor)
        own = slice(self.rank() * output.numel(), (self.rank() + 1) * output.numel())
        if name is not None:
            values = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
            part = torch.from_numpy(self.group.reduce_scatter(values.numpy(), name))
        else:
            part = _reduced(self._gathered(tensor), opts.reduceOp).reshape(-1)[own]
        _put(part.view(output.shape), output)
        return _done([output])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        """Reduces and scatters several tensors, one after another."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return _done(list(outputs))

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> Any:
        """Serves `torch.distributed.reduce_scatter`; parts may have different lengths."""
        ((output,), (parts,)) = outputs, tensors
        width = max(part.numel() for part in parts)
        pad = torch.nn.functional.pad
        padded = [pad(part.reshape(-1), (0, width - part.numel())) for part in parts]
        whole = padded[self.rank()].clone()
        self.reduce_scatter_single(whole, torch.cat(padded), opts)
        _put(whole[: output.numel()].view(output.shape), output)
        return _done([output])

    # Moving.

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Serves `torch.distributed.broadcast`."""
        (tensor,) = tensors
        words = words_of([tensor])
        self.group.broadcast(words, opts.rootRank, codec="fp32")
        if self.rank() != opts.rootRank:
            put_back(words, [tensor])
        return _done([tensor])

    def allgather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> Any:
        """Serves `torch.distributed.all_gather`; ranks' tensors may have different shapes."""
        (places,) = outputs
        self._gather([[place] for place in places], tensors)
        return _done(list(places))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """Serves `torch.distributed.all_gather_into_tensor`."""
        _put(torch.stack(self._gathered(tensor)).view(output.shape), output)
        return _done([output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Gathers several tensors, one after another."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor)
        return _done(list(outputs))

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> Any:
        """Serves `torch.distributed.all_gather_coalesced`, with a list of outputs for each rank."""
        self._gather(outputs, tensors)
        return _done([place for places in outputs for place in places])

    def gather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        opts: Any,
    ) -> Any:
        """Serves `torch.distributed.gather`."""
        (tensor,) = tensors
        gathered = self._gathered(tensor)
        if self.rank() == opts.rootRank:
            for place, found in zip(outputs[0], gathered, strict=True):
                _put(found, place)
        return _done([tensor])

    def scatter(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> Any:
        """Serves `torch.distributed.scatter`."""
        (output,) = outputs
        is_root = self.rank() == opts.rootRank
        parts = list(tensors[0]) if is_root else [torch.empty_like(output)] * self.size()
        words = words_of(parts)
        self.group.broadcast(words, opts.rootRank, codec="fp32")
        length = words.size // self.size()
        put_back(words[self.rank() * length : (self.rank() + 1) * length], [output])
        return _done([output])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Serves `torch.distributed.all_to_all_single`."""
        even = [len(tensor) // self.size()] * self.size()
        parts = tensor.split(list(input_sizes) or even)
        self.alltoall(output.split(list(output_sizes) or even), parts)
        return _done([output])

    def alltoall(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Serves `torch.distributed.all_to_all`. Each rank gets all that any rank sends."""
        counts = [tensor.numel() for tensor in tensors]
        counts_of = self._gathered(torch.tensor(counts, device="cpu"))
        dtype = tensors[0].dtype
        everything = [torch.empty(int(each.sum()), dtype=dtype, device="cpu") for each in counts_of]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._gather([[each] for each in everything], [flat])
        for source, (output, each) in enumerate(zip(outputs, everything, strict=True)):
            found = each.split(counts_of[source].tolist())[self.rank()]
            if found.numel() != output.numel():
                raise CollectiveMismatchError(
                    f"rank {source} sent {found.numel()} elements to rank {self.rank()}, which has "
                    f"room for {output.numel()}; let the split sizes of both agree",
                    rank=source,
                )
            _put(found.view(output.shape), output)
        return _done(list(outputs))

    def barrier(self, opts: Any = None) -> Any:
        """Serves `torch.distributed.barrier`."""
        timeout_s = 0.0 if opts is None else opts.timeout.total_seconds()
        self.group.barrier(timeout_s=timeout_s if timeout_s > 0 else None)
        return _done([])

    # What there is not.

    def send(self, *_: Any) -> Any:
        """Refuses a message, whatever it is."""
        raise ArgumentError(_NO_MESSAGES)

    recv = recv_anysource = send

    # Earlier versions of torch call them so.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Ending.

    def shutdown(self) -> None:
        """Leaves the group."""
        self.group.close()
        self._telling.shutdown()

    def abort(self) -> None:
        """Ends the group, as `shutdown` does."""
        self.shutdown()

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        like = {"dtype": tensor.dtype, "device": "cpu"}
        found = [torch.empty(tensor.shape, **like) for _ in range(self.size())]
        self._gather([[each] for each in found], [tensor])
        return found

    def _gather(
        self, places: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Puts every rank's tensors, bit for bit, into its places; all ranks know all lengths."""
        own = words_of(tensors)
        words = np.zeros((self.size(), max(map(word_count, places))), np.float32)
        if own.size != word_count(places[self.rank()]):
            raise ArgumentError(
                f"rank {self.rank()} gathers {own.size * 2} bytes, and has room for "
                f"{word_count(places[self.rank()]) * 2} of its own; pass outputs of every rank's "
                f"shape"
            )
        words[self.rank(), : own.size] = own
        self.group.all_gather(words, codec="fp32")
        for row, found in zip(words, places, strict=True):
            put_back(row, found)

    def _sum_sparse(self, tensor: torch.Tensor, op: Any) -> None:
        if op != dist.ReduceOp.SUM:
            raise ArgumentError(f"sparse tensors are reduced by SUM alone; got {op}")
        own = tensor.detach().cpu().coalesce()
        count = torch.tensor([own.values().shape[0]], device="cpu")
        counts = [int(each) for each in self._gathered(count)]
        indices = [own.indices().new_empty(own.sparse_dim(), count) for count in counts]
        values = [own.values().new_empty(count, *own.values().shape[1:]) for count in counts]
        self._gather(list(zip(indices, values, strict=True)), [own.indices(), own.values()])
        parts = torch.cat(indices, 1), torch.cat(values)
        total = torch.sparse_coo_tensor(*parts, own.shape, check_invariants=True, device="cpu")
        with torch.no_grad():
            tensor.copy_(total.coalesce())


def _reduction(op: Any, tensor: torch.Tensor) -> ReductionName | None:
    if tensor.dtype not in _AS_FLOAT32:
        return None
    return next((name for known, name in _REDUCTIONS if op == known), None)


def _reduced(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    reduce = next((reduce for known, reduce in _BY_TORCH if op == known), None)
    if reduce is None:
        raise ArgumentError(f"reduction {op} is not among those of backend {BACKEND_NAME!r}")
    total = functools.reduce(reduce, tensors)
    if op == dist.ReduceOp.AVG:
        total = (total / len(tensors)).to(total.dtype)
    return total


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    """Returns its values as contiguous float32 on the CPU: itself, where it is that."""
    return tensor.detach().to("cpu", torch.float32).contiguous()


def _put(values: torch.Tensor, tensor: torch.Tensor) -> None:
    if values.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(values)


def _done(result: list[torch.Tensor]) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    make: Any = torch._C._distributed_c10d._create_work_from_future
    return make(future)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ShardwellProcessGroup:
    seconds = timeout.total_seconds()
    met = StoreMeeting(store, rank, size, timeout_s=seconds).meet()
    codec: Any = variable(CODEC_VARIABLE) or "fp32"  # which join_group checks
    group = join_group(
        met.name,
        rank=rank,
        size=size,
        rendezvous=[met.address],
        strategy=variable(STRATEGY_VARIABLE) or "ring",
        codec=codec,
        timeout_s=seconds,
        join_timeout_s=seconds,
        allow_non_finite=True,  # as torch's own backends do
    )
    try:
        group.barrier()  # rank 0 serves the meeting place: no rank leaves before all have come
    except BaseException:
        group.close()
        raise
    return ShardwellProcessGroup(group)


def register() -> None:
    """Lets `init_process_group("shardwell")` find it; safe to repeat."""
    if BACKEND_NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND_NAME, _create, devices=["cpu"])
