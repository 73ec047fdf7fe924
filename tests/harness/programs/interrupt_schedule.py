"""Interrupts of join_group at each of its instants, one after another, and a group made after each.

python interrupt_schedule.py KIND THREAD RENDEZVOUS FIRST STRIDE COUNT

THREAD "caller": the main thread has a KeyboardInterrupt at the k-th place at which Python looks for
signals: where a function begins or a loop goes on, and after each call of what is written in C.
THREAD "call": the caller gets SIGINT while the call's own threads, which get none, begin their k-th
function, and that thread is held meanwhile. k is FIRST, FIRST + STRIDE, .., COUNT of them, or until
a call ends before its k-th instant. KIND "alone" is a group of one, "pair" of two, of which
the other rank is a thread without interrupts, "elastic" one of one that may grow.

Then the same call, without interrupts, must end in AFTERWARDS_S. Prints JSON: how many calls were
interrupted, whether the last instant was reached, and at which places one failed, or after it one
took too long.
"""

from __future__ import annotations

import dis
import faulthandler
import json
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import shardwell

AFTERWARDS_S = 15.0
"""A call without interrupts that takes longer than this hangs: it takes milliseconds."""
HELD_S = 0.2
"""How long the call's thread is held, for the caller to be interrupted."""
MAIN = threading.main_thread().ident
assert MAIN is not None


class Schedule:
    """Interrupts a block at its k-th instant."""

    def __init__(self, thread: str) -> None:
        self.place = ""
        """Where the block was interrupted, or is; empty: it had no such instant."""
        self._of_caller = thread == "caller"
        self._rest = 0
        self._lock = threading.Lock()
        self._is_counting = self._is_armed = False
        self._called: dict[FrameType, bool] = {}
        """Frames whose last instruction looks for signals when it ends."""
        self._handled = threading.Event()
        signal.signal(signal.SIGINT, self._handle)

    def begin(self, number: int) -> None:
        """Counts from now on."""
        self._rest, self.place, self._is_counting = number, "", True
        self._called.clear()
        self._handled.clear()
        if self._of_caller:
            sys.settrace(self._trace)
        else:
            threading.settrace(self._trace_call)

    def end(self) -> None:
        """Interrupts nothing from now on."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        with self._lock:
            self._is_counting = self._is_armed = False

    def _is_due(self, frame: FrameType) -> bool:
        self._rest -= 1
        if self._rest < 0:
            self.place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
        return self._rest < 0

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_back is not None:
            self._called[frame.f_back] = False  # a call of Python's code does not look at its end
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            is_instant = self._called.pop(frame, False) or name == "RESUME"
            self._called[frame] = name.startswith("CALL") or name == "JUMP_BACKWARD"
            if is_instant and self._is_due(frame):
                raise KeyboardInterrupt
        elif event == "return":
            self._called.pop(frame, None)
        return self._count

    def _trace_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """At each function of Shardwell's that a thread of the call begins."""
        if "/shardwell" not in frame.f_code.co_filename:
            return None
        with self._lock:
            if not self._is_counting or self._is_armed or not self._is_due(frame):
                return None
            self._is_armed = True
            signal.pthread_kill(MAIN, signal.SIGINT)
        self._handled.wait(HELD_S)
        return None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed and frame is not None and frame.f_code.co_name != "end":
            self._is_counting = self._is_armed = False
            self._handled.set()
            raise KeyboardInterrupt


class Other:
    """The other rank of pairs: a thread that joins each group that is named, and leaves it."""

    def __init__(self, rendezvous: str) -> None:
        self._rendezvous = rendezvous

    def join(self, name: str) -> threading.Thread:
        """Begins to take part in a group."""
        thread = threading.Thread(target=self._take_part, args=(name,), daemon=True)
        thread.start()
        return thread

    def _take_part(self, name: str) -> None:
        try:
            with shardwell.join_group(
                name, rank=1, size=2, rendezvous=self._rendezvous, join_timeout_s=AFTERWARDS_S
            ) as group:
                group.barrier(timeout_s=AFTERWARDS_S)
        except shardwell.ShardwellError:
            pass  # the rank with interrupts did not come


def main(kind: str, thread: str, rendezvous: str, first: int, stride: int, count: int) -> None:
    schedule, other = Schedule(thread), Other(rendezvous)
    options: dict[str, Any] = {"rank": 0, "size": 2 if kind == "pair" else 1}
    if kind == "elastic":
        options |= {"elastic": True, "size": 4, "lease_s": 0.2}

    def call(name: str) -> None:
        with shardwell.join_group(
            name, rendezvous=rendezvous, join_timeout_s=2 * AFTERWARDS_S, **options
        ) as group:
            group.barrier(timeout_s=2 * AFTERWARDS_S)

    def whole(name: str) -> None:
        """The call without interrupts."""
        if kind == "pair":
            other.join(name)
        call(name)

    whole("first")  # imports are not what is looked at
    interrupts, failures, is_complete, number = 0, [], False, first
    for number in range(first, first + stride * count, stride):
        faulthandler.dump_traceback_later(4 * AFTERWARDS_S, exit=True)
        if kind == "pair":
            other.join(f"interrupted-{number}")
        schedule.begin(number)
        try:
            call(f"interrupted-{number}")
        except KeyboardInterrupt:
            interrupts += 1
        except shardwell.ShardwellError as error:
            failures.append(f"{schedule.place}: {error.message}")
        schedule.end()
        if not schedule.place:
            is_complete = True
            break
        began_s = time.monotonic()
        whole(f"after-{number}")
        if time.monotonic() - began_s > AFTERWARDS_S:
            failures.append(f"{number}: {schedule.place}")
            faulthandler.dump_traceback()
    faulthandler.cancel_dump_traceback_later()
    found = {"interrupts": interrupts, "is_complete": is_complete, "last": number}
    print(json.dumps({**found, "failures": failures}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:7]))
