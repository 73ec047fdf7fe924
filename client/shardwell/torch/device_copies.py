"""Copies of gradients from a GPU that do not block, and the call that follows each.

A copy runs on a stream of its own, behind what has computed the gradient and beside what computes
the next. An event ends it; a thread waits for the events in order, so that a gradient is announced
when its copy has ended, whether backward goes on or not.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch


class Event(Protocol):
    """The end of a copy, such as a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Blocks until the copy is done."""


class Copier(Protocol):
    """An object that begins copies."""

    def takes(self, source: torch.Tensor) -> bool:
        """Returns True for a source for whose copy no thread should wait."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Begins to copy; `source` must not be written before the event."""


class StreamCopier:
    """Copies from GPUs, each on a stream that has nothing else to do."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def takes(self, source: torch.Tensor) -> bool:
        """True if it is on a GPU."""
        return bool(source.is_cuda)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Begins to copy behind what the source's device was given before; see `Copier`."""
        device = source.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            # Its thread sleeps: one that spins would take a core from what encodes.
            event: Event = stream.record_event(torch.cuda.Event(blocking=True))
        source.record_stream(stream)  # so that its memory is not reused before the copy is done
        return event


_Item: TypeAlias = tuple[Event, Callable[[], None]] | threading.Event | None
"""A copy with its follow-up; an event to set once all before it are done; or None, the end."""


class DeviceCopies:
    """The copies under way, by default from GPUs. Any thread may use it.

    Its thread begins with the first copy, and ends with `close` or with this object.
    """

    def __init__(self, copier: Copier | None = None) -> None:
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
