"""A process group for `torch.distributed`, in Python: `init_process_group("shardwell")`.

Ranks meet where torch's store says: each writes the address at which it listens, and all join a
group of those. Float32, and what becomes it without loss, is reduced by the group's collectives, in
its codec; other dtypes, and reductions that a group does not have, are gathered as bytes and
reduced by torch in the order of the ranks: exact, and as many times the bytes as there are ranks.
"""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwell.errors import ArgumentError
from shardwell.group.group import Group
from shardwell.group.join import join_group
from shardwell.numerics.reduction import ReductionName
from shardwell.torch.words import put_back, words_of

BACKEND_NAME = "shardwell"
_FOR_EVER = timedelta(0)
"""As torch says it; the group's own deadlines hold."""
_LATEST_COUNT = 4
"""All-reduces that are kept when they have ended, with their tensors."""
CODEC_VARIABLE = "SHARDWELL_CODEC"
"""How what is reduced travels: fp32 (default), fp16 or bf16."""
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
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def end(self, error: BaseException | None) -> None:
        """Its tensor is what it is to be, or there is an error."""
        if error is None:
            self._ended.set_result(None)
            self._future.set_result([self._tensor])
        else:
            self._ended.set_exception(error)
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """Blocks until it has ended, and raises its error."""
        self._ended.result(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._ended.done()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Of the tensor."""
        return self._future

    def result(self) -> list[torch.Tensor]:
        """The tensor."""
        return [self._tensor]


class ShardwellProcessGroup(dist.ProcessGroup):
    """One, over a group. Errors of the group come out of the calls, or of `Work.wait`."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        """What does the work."""
        # C++ callers hold no reference to what Python adds to a Work: it is kept until it has
        # ended, and they have asked for its future.
        self._under_way: set[_Work] = set()
        self._latest: deque[_Work] = deque(maxlen=_LATEST_COUNT)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """See torch."""
        return BACKEND_NAME

    def __repr__(self) -> str:
        return f"ShardwellProcessGroup({self.group!r})"

    # Reducing.

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """See `torch.distributed.all_reduce`."""
        (tensor,) = tensors
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        name = _reduction(op, tensor)
        if name is None:
            tensor.copy_(_reduced(self._gathered(tensor), op))
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
            self._under_way.discard(work)

        self.group.all_reduce_async(values.numpy(), name).add_done_callback(done)
        return work

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """See torch."""
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        for work in works:
            work.wait()
        return _done(list(tensors))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """See `torch.distributed.reduce`."""
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
                tensor.copy_(_reduced(gathered, opts.reduceOp))
        return _done([tensor])

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """See `torch.distributed.reduce_scatter_tensor`."""
        name = _reduction(opts.reduceOp, tensor)
        own = slice(self.rank() * output.numel(), (self.rank() + 1) * output.numel())
        if name is not None:
            values = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
            part = torch.from_numpy(self.group.reduce_scatter(values.numpy(), name))
        else:
            part = _reduced(self._gathered(tensor), opts.reduceOp).reshape(-1)[own]
        output.copy_(part.view(output.shape))
        return _done([output])

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> Any:
        """See `torch.distributed.reduce_scatter`."""
        ((output,), (parts,)) = outputs, tensors
        flat = torch.cat([part.reshape(-1) for part in parts])
        self.reduce_scatter_single(output, flat, opts)
        return _done([output])

    # Moving.

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """See `torch.distributed.broadcast`."""
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
        """See `torch.distributed.all_gather`."""
        ((tensor,), (places,)) = tensors, outputs
        for place, found in zip(places, self._gathered(tensor), strict=True):
            place.copy_(found.view(place.shape))
        return _done(list(places))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """See `torch.distributed.all_gather_into_tensor`."""
        output.copy_(torch.stack(self._gathered(tensor)).view(output.shape))
        return _done([output])

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> Any:
        """See torch."""
        for places, tensor in zip(outputs, tensors, strict=True):
            self.allgather([places], [tensor])
        return _done([place for places in outputs for place in places])

    def gather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        opts: Any,
    ) -> Any:
        """See `torch.distributed.gather`."""
        (tensor,) = tensors
        gathered = self._gathered(tensor)
        if self.rank() == opts.rootRank:
            for place, found in zip(outputs[0], gathered, strict=True):
                place.copy_(found)
        return _done([tensor])

    def scatter(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> Any:
        """See `torch.distributed.scatter`."""
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
        """See `torch.distributed.all_to_all_single`; even parts alone."""
        if output_sizes or input_sizes:
            raise ArgumentError("all_to_all_single with split sizes is not among the collectives")
        found = [part.chunk(self.size())[self.rank()] for part in self._gathered(tensor)]
        output.copy_(torch.cat(found).view(output.shape))
        return _done([output])

    def alltoall(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """See `torch.distributed.all_to_all`; parts of one shape alone."""
        stacked = torch.stack(list(tensors))
        for output, found in zip(outputs, self._gathered(stacked), strict=True):
            output.copy_(found[self.rank()])
        return _done(list(outputs))

    def barrier(self, opts: Any = None) -> Any:
        """See `torch.distributed.barrier`."""
        self.group.barrier()
        return _done([])

    # Earlier versions of torch call them so.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # Ending.

    def shutdown(self) -> None:
        """Leaves the group."""
        self.group.close()

    def abort(self) -> None:
        """The same."""
        self.group.close()

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, bit for bit."""
        own = words_of([tensor])
        words = np.zeros((self.size(), own.size), np.float32)
        words[self.rank()] = own
        self.group.all_gather(words, codec="fp32")
        found = []
        for row in words:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            put_back(row, [made])
            found.append(made)
        return found


def _reduction(op: Any, tensor: torch.Tensor) -> ReductionName | None:
    """The group's name of a reduction, if it makes it of such tensors."""
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
    """Its values as contiguous float32 on the CPU: itself, where it is that."""
    return tensor.detach().to("cpu", torch.float32).contiguous()


def _put(values: torch.Tensor, tensor: torch.Tensor) -> None:
    """Puts a result where it belongs, if that is elsewhere."""
    if values.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(values)


def _done(result: list[torch.Tensor]) -> Any:
    """What has ended."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    make: Any = torch._C._distributed_c10d._create_work_from_future
    return make(future)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ShardwellProcessGroup:
    """What torch calls for each process group."""
    host = _own_host()
    with socket.create_server((host, 0), family=_family(host)) as free:
        port = free.getsockname()[1]
    store.set(f"shardwell/{rank}", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    if rank == 0:
        store.set("shardwell/name", f"torch-{uuid.uuid4().hex}")
    addresses = [store.get(f"shardwell/{other}").decode() for other in range(size)]
    seconds = timeout.total_seconds()
    codec: Any = os.environ.get(CODEC_VARIABLE, "fp32")  # which join_group checks
    group = join_group(
        store.get("shardwell/name").decode(),
        rank=rank,
        size=size,
        rendezvous=addresses,
        strategy=os.environ.get(STRATEGY_VARIABLE, "ring"),
        codec=codec,
        timeout_s=seconds,
        join_timeout_s=seconds,
        allow_non_finite=True,  # as torch's own backends do
    )
    return ShardwellProcessGroup(group)


def _own_host() -> str:
    """The address of this machine that leads to where the ranks meet."""
    meeting = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    family, _, _, _, address = socket.getaddrinfo(meeting, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def register() -> None:
    """Lets `init_process_group("shardwell")` find it; safe to repeat."""
    if BACKEND_NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND_NAME, _create, devices=["cpu"])
