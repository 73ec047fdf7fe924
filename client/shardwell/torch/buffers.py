"""A model's tensors in flat memory that NumPy and torch share, and as words that travel."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch

from shardwell.errors import ArgumentError
from shardwell.numerics.codec import Float32
from shardwell.numerics.tensors import LARGE_ELEMENT_COUNT
from shardwell.parameter.values import NamedArrays, TensorViews
from shardwell.specs.layout import TensorLayout


class FlatTensors:
    """Two views of one float32 buffer in a layout's order: torch's tensors and NumPy's arrays."""

    def __init__(self, layout: TensorLayout, *, is_pinned: bool = False) -> None:
        # Named, for a program may have another default device.
        flat = torch.zeros(layout.size, dtype=torch.float32, device="cpu", pin_memory=is_pinned)
        self.views = [flat[t.offset : t.stop].view(t.shape) for t in layout]
        self.arrays = TensorViews(layout, flat.numpy())


class ModelBuffers:
    """A model's gradients and weights in flat memory; GPUs read it until `await_uploads` ends."""

    def __init__(self, tensors: Iterable[torch.nn.Parameter], layout: TensorLayout) -> None:
        self.layout = layout
        self._tensors = list(tensors)
        self.is_on_gpu = self._has_gpu
        self.gradients = FlatTensors(layout, is_pinned=self.is_on_gpu)
        self.weights = FlatTensors(layout, is_pinned=self.is_on_gpu)
        self._large = [tensor.size >= LARGE_ELEMENT_COUNT for tensor in layout]
        self._uploads: list[torch.cuda.Event] = []
        self._versions: list[int] = []
        copy_all(self.weights.views, [tensor.detach() for tensor in self._tensors])

    @property
    def _has_gpu(self) -> bool:
        return any(tensor.is_cuda for tensor in self._tensors)

    def follow_device(self) -> None:
        """Makes the buffers anew if the model was moved to a GPU or from it, between steps."""
        is_on_gpu = self._has_gpu
        if is_on_gpu != self.is_on_gpu:
            self.await_uploads()
            before, self.is_on_gpu = self.weights, is_on_gpu
            self.gradients = FlatTensors(self.layout, is_pinned=is_on_gpu)
            self.weights = FlatTensors(self.layout, is_pinned=is_on_gpu)
            copy_all(self.weights.views, before.views)

    def copy_gradients(self, but: Container[int], *, may_lie: bool) -> NamedArrays:
        """Copies gradients, except those at `but`; with `may_lie`, returns large ones uncopied."""
        targets, sources = [], []
        lying: NamedArrays = {}
        for place, (spec, tensor) in enumerate(zip(self.layout, self._tensors, strict=True)):
            if place in but:
                continue
            if tensor.grad is None:
                self.gradients.views[place].zero_()
            elif tensor.grad.layout != torch.strided:
                raise sparse(spec.name)
            elif may_lie and self._large[place] and is_sent_in_place(tensor.grad):
                lying[spec.name] = tensor.grad.detach().numpy()
            else:
                targets.append(self.gradients.views[place])
                sources.append(tensor.grad)
        if targets:
            copy_all(targets, sources, non_blocking=self.is_on_gpu)
            for event in self._recorded():
                event.synchronize()
        return lying

    def put_weights(self) -> None:
        """Puts the weights into the model; a GPU copies them meanwhile."""
        copy_all(self._tensors, self.weights.views, non_blocking=self.is_on_gpu)
        self._uploads = self._recorded()
        self._versions = [tensor._version for tensor in self._tensors]

    def await_uploads(self) -> None:
        """Blocks until GPUs have the weights, whose buffer may be written from then on."""
        for event in self._uploads:
            event.synchronize()
        self._uploads = []

    def other_weights(self) -> set[str]:
        """The names of tensors whose weights are not those that `put_weights` put there."""
        found = set()
        for place, tensor in enumerate(self._tensors):
            if tensor._version != self._versions[place]:
                view = self.weights.views[place]
                if not torch.equal(tensor.detach().cpu(), view.to(tensor.dtype)):
                    found.add(self.layout.tensors[place].name)
                else:
                    self._versions[place] = tensor._version  # they were loaded, and are equal
        return found

    def _recorded(self) -> list[torch.cuda.Event]:
        events = []
        for device in {tensor.device for tensor in self._tensors if tensor.is_cuda}:
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events


class StreamCopier:
    """Copies from GPUs, each on a stream that has nothing else to do."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def takes(self, source: torch.Tensor) -> bool:
        """True if it is on a GPU."""
        return bool(source.is_cuda)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Begins to copy behind what the source's device was given before.

        The source must not be written before the event.
        """
        device = source.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            # Its thread sleeps: one that spins would take a core from what encodes.
            event: torch.cuda.Event = stream.record_event(torch.cuda.Event(blocking=True))
        source.record_stream(stream)  # so that its memory is not reused before the copy is done
        return event


_Item: TypeAlias = tuple[torch.cuda.Event, Callable[[], None]] | threading.Event | None
"""A copy with its follow-up; an event to set once all before it are done; or None, the end."""


class DeviceCopies:
    """The copies of gradients from GPUs that are under way. Any thread may use it.

    A copy runs on a stream of its own, behind what has computed the gradient and beside what
    computes the next. An event ends it; a thread waits for the events in order, so that a gradient
    is announced when its copy has ended, whether backward goes on or not.

    Its thread begins with the first copy, and ends with `close` or with this object.
    """

    def __init__(self, copier: StreamCopier | None = None) -> None:
        self._copier = StreamCopier() if copier is None else copier
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._failures: list[BaseException] = []
        self._has_thread = False
        self._end = weakref.finalize(self, self._items.put, None)

    def takes(self, source: torch.Tensor) -> bool:
        """True if it is for `copy`; others are copied at once."""
        return self._copier.takes(source)

    def copy(self, target: torch.Tensor, source: torch.Tensor, then: Callable[[], None]) -> None:
        """Begins to copy. `then` is called when it is done, on the thread of the copies."""
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(
                target=_work,
                args=(self._items, self._failures),
                name="shardwell-gpu-copies",
                daemon=True,
            ).start()
        self._items.put((self._copier.copy(target, source), then))

    def wait(self) -> None:
        """Blocks until all copies are done that were begun, and what follows them."""
        if not self._has_thread:
            return
        done = threading.Event()
        self._items.put(done)
        done.wait()
        if self._failures:
            failure = self._failures[0]
            self._failures.clear()
            raise failure

    def close(self) -> None:
        """Ends the thread behind what is under way. Safe to repeat; `copy` begins another."""
        if self._has_thread:
            self._has_thread = False
            self._items.put(None)


def _work(items: queue.SimpleQueue[_Item], failures: list[BaseException]) -> None:
    while (item := items.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        event, then = item
        try:
            event.synchronize()
            then()
        except BaseException as error:
            failures.append(error)
        del item, event, then  # what they hold is the optimizer's to let go


def sparse(tensor_name: str) -> ArgumentError:
    """Returns the error of a gradient that is not dense."""
    return ArgumentError(
        f"gradients of tensor {tensor_name!r} are sparse; dense ones are expected; make its layer "
        "with sparse=False, or train it as a table"
    )


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor without values."""
    if tensor.device.type == "meta":
        raise ArgumentError(
            f"tensor {name!r} is on device 'meta', which has no values; give the model memory first"
        )


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor that a parameter can't hold."""
    if hasattr(tensor, "full_tensor"):  # DTensor's
        raise ArgumentError(
            f"tensor {name!r} is a DTensor, as of FSDP or tensor parallelism: a part of it is in "
            "each of several processes, and a worker has all of its model; leave the model whole"
        )
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise ArgumentError(
            f"tensor {name!r} has no shape yet, being of a lazy layer; run the model once before"
        )
    if not tensor.is_floating_point():
        raise ArgumentError(
            f"tensor {name!r} is {tensor.dtype}; only floating point is trained; leave it out, or "
            "set requires_grad=False"
        )
    check_readable(name, tensor)
    if tensor.layout != torch.strided:
        raise ArgumentError(f"tensor {name!r} is {tensor.layout}; only dense tensors are trained")


def is_sent_in_place(gradient: torch.Tensor) -> bool:
    """True if it can be sent from where it lies."""
    return (
        gradient.dtype == torch.float32
        and gradient.device.type == "cpu"
        and bool(gradient.is_contiguous())
    )


def copy_all(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    non_blocking: bool = False,
) -> None:
    """Copies each source to its target; with `non_blocking`, a GPU is to be waited for."""
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def as_float32(name: str, tensor: torch.Tensor) -> Float32:
    """Returns floating point values on the CPU, rounded to float32."""
    check_readable(name, tensor)
    own = tensor.detach().cpu()
    values = own.to(torch.float32)
    if own.dtype == torch.float64 and bool((values.isinf() & ~own.isinf()).any()):
        raise ArgumentError(
            f"tensor {name!r} has values beyond {np.finfo(np.float32).max:g}, float32's largest, "
            "in which means are made; make it a buffer with persistent=False, which stays each "
            "worker's own"
        )
    array: Float32 = values.numpy()
    return array


# Tensors of any dtype as float32 that travels without loss: their bytes, two a number.


def word_count(tensors: Sequence[torch.Tensor]) -> int:
    """The number of words that `words_of` makes of them."""
    return sum(-(-tensor.numel() * tensor.element_size() // 2) for tensor in tensors)


def words_of(tensors: Sequence[torch.Tensor]) -> Float32:
    """The bytes of tensors, whatever they mean, one behind the other."""
    parts = [np.frombuffer(_bytes_of(tensor), "<u2").astype(np.float32) for tensor in tensors]
    return np.concatenate(parts)


def put_back(words: Float32, tensors: Sequence[torch.Tensor]) -> None:
    """Puts into tensors, of the same dtypes and shapes, what `words_of` took from others."""
    data, start = words.astype("<u2").tobytes(), 0
    with torch.no_grad():
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if size:
                own = torch.frombuffer(bytearray(data[start : start + size]), dtype=tensor.dtype)
                tensor.copy_(own.view(tensor.shape))
            start += size + size % 2


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return data + bytes(len(data) % 2)


def pieces(tensors: Mapping[str, torch.Tensor], size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yields as many tensors at a time as fit into `size` words, at least one."""
    piece: dict[str, torch.Tensor] = {}
    count = 0
    for name, tensor in tensors.items():
        own = word_count([tensor])
        if piece and count + own > size:
            yield piece
            piece, count = {}, 0
        piece[name] = tensor
        count += own
    if piece:
        yield piece
