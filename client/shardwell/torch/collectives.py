"""A group of workers for PyTorch, without a server: DDP's gradients, and first weights."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from shardwell.errors import GroupMismatchError
from shardwell.group.group import Group
from shardwell.torch.buffers import check_readable, pieces, put_back, words_of
from shardwell.torch.plain_names import PlainNames

_PIECE_ELEMENT_COUNT = 2**23
"""Elements of a broadcast: 32 MiB at a time, whatever the model."""


def all_reduce_hook(group: Group, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DDP: `ddp.register_comm_hook(group, all_reduce_hook)`.

    The group averages each bucket in the background, in its codec, while backward goes on. DDP
    still has a process group of its own, for what it broadcasts at the start.

    Args:
        group: Made by `shardwell.join_group`, with DDP's ranks. Nothing else may call it while
            backward runs.
        bucket: A `torch.distributed.GradBucket`.

    Returns:
        A future of the mean; an error of the group comes out of `backward`.

    Examples:
        >>> def wrapped(model, group):  # torch.distributed is initialized, with gloo for example
        ...     ddp = torch.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(group, shardwell.torch.all_reduce_hook)
        ...     return ddp
    """
    buffer = bucket.buffer()
    is_shared = buffer.device.type == "cpu" and buffer.dtype == torch.float32
    values = buffer if is_shared else buffer.to("cpu", torch.float32)
    devices = [] if buffer.device.type == "cpu" else [buffer.device]
    ended: torch.futures.Future[BaseException | None] = torch.futures.Future(devices=devices)

    def done(call: Future[None]) -> None:
        error = call.exception()
        if error is None and not is_shared:
            buffer.copy_(values)
        ended.set_result(error)

    def mean(ended: torch.futures.Future[BaseException | None]) -> torch.Tensor:
        error = ended.value()
        if error is not None:
            raise error
        return buffer

    group.all_reduce_async(values.numpy(), "mean").add_done_callback(done)
    return ended.then(mean)  # of what is raised there, torch keeps name and text


all_reduce_hook.__annotations__.clear()  # DDP compares them with types, and here they are text


def broadcast_state(model: torch.nn.Module, group: Group, root: int = 0) -> None:
    """Gives the state of one rank's model to all: parameters and buffers, bit for bit. Blocks.

    All ranks call it.

    Args:
        model: The model, the same on every rank, except for its values.
        group: Made by `shardwell.join_group`.
        root: Rank of the state that counts.

    Raises:
        GroupMismatchError: a rank has another model; all ranks get it, and nothing is changed.
        ArgumentError: a tensor has no values.
        ShardwellError: as `Group.broadcast`.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> shardwell.torch.broadcast_state(model, group)  # rank 0's weights for all
    """
    state = {
        name: tensor
        for name, tensor in PlainNames(model).of(model.state_dict().items()).items()
        if isinstance(tensor, torch.Tensor)
    }
    _check_same(state, group)
    with torch.no_grad():
        for piece in pieces(state, _PIECE_ELEMENT_COUNT):
            tensors = list(piece.values())
            words = words_of(tensors)
            group.broadcast(words, root, codec="fp32")
            if group.rank != root:
                put_back(words, tensors)


def _check_same(state: dict[str, torch.Tensor], group: Group) -> None:
    told = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}" + " on meta" * (tensor.device.type == "meta")
        for name, tensor in state.items()
    ]
    most = np.array([len(told)], np.float32)
    group.all_reduce(most, "max", codec="fp32")
    digests = [hashlib.blake2b(text.encode(), digest_size=3).digest() for text in told]
    highest = np.full(int(most[0]), -1, np.float32)
    highest[: len(told)] = [int.from_bytes(digest, "little") for digest in digests]
    lowest = highest.copy()
    group.all_reduce(highest, "max", codec="fp32")
    group.all_reduce(lowest, "min", codec="fp32")
    if (highest != lowest).any():
        place = int(np.argmax(highest != lowest))
        here = told[place] if place < len(told) else "none"
        raise GroupMismatchError(
            f"the ranks' models differ at tensor {place}, here {here}; give all the same"
        )
    for name, tensor in state.items():
        check_readable(name, tensor)
