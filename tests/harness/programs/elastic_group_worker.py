"""A worker of an elastic group that trains until its input ends, one line of JSON for each step.

python elastic_group_worker.py TARGET UID OPTIONS

It contributes 2^UID times a factor of the step, so that a sum says who took part; weights are a
function of all sums so far. What it prints: {"joined": size}; {"given": step} when it was given the
state; {"step", "who", "crc", "rank", "size"}, with the mask of those who took part and the weights'
CRC after it; {"error": ...} of a call that failed; {"over": ...} when others went on without it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import zlib
from typing import Any

import numpy as np

import shardwell
from shardwell.group import engine
from shardwell.group.state import SharedState

ELEMENT_COUNT = 16
"""Of the weights."""
SENT_COUNT = 4
"""Chunks that a rank sends before it dies: others have some final values then."""
TELLING_S = 0.3
"""How long a message of a rank that dies may take to leave its process."""


def factor_of(step: int) -> int:
    """What a contribution is multiplied by."""
    return 1 + step % 4


def after(weights: np.ndarray, who: int, step: int) -> np.ndarray:
    """The weights after a step to which the workers of a mask contributed."""
    return weights * 0.5 + np.arange(1, ELEMENT_COUNT + 1) * who * factor_of(step)


def say(**fields: Any) -> None:
    """One line."""
    print(json.dumps(fields), flush=True)


class Death:
    """Kills this process at one instant of a sum, on the worker that has a rank then.

    Args:
        rank: The rank that dies.
        size: Members that there are then; the others begin the step again with fewer.
        step: The step in whose sum it does.
        at: "announcing": before it calls; "sending": when it has sent some chunks; "made": when it
            has the result, and no other rank knows; "known": when rank 0 knows that it has; "going"
            and "making": rank 0, when rank 1 alone knows that the call goes on, or is made.
            Of a state that moves, in any step: "giving": rank 0, and "taking": a newcomer, when
            some has come.
    """

    def __init__(self, rank: int, size: int, step: int, at: str) -> None:
        self._when, self._at = (rank, size, step), at

    def arm_state(self, group: shardwell.Group, step: int) -> None:
        """Before a state moves."""
        if self._at == "giving" and group.rank == 0 and step > 0:
            self._kind, self._method = SharedState, "words"
        elif self._at == "taking" and step == 0:
            self._kind, self._method = SharedState, "take"
        else:
            return
        as_it_was = getattr(self._kind, self._method)

        def in_a_piece(state: Any, start: int, rest: Any) -> Any:
            if start > 0:
                die()
            return as_it_was(state, start, rest)

        setattr(self._kind, self._method, in_a_piece)
        self._at = ""

    def arm(self, group: shardwell.Group, step: int) -> None:
        """Before the sum of a step."""
        if (group.rank, group.size, step) != self._when:
            return
        if self._at == "announcing":
            die()
        elif self._at == "sending":
            self._send, self._count = engine._send, 0
            engine._send = self._sending
        elif self._at in ("made", "known"):
            agreement = group._generation._agreement
            self._made, agreement.made = agreement.made, self._making
        else:
            host = group._generation._host
            self._hand_out, host._hand_out = host._hand_out, self._telling

    def _sending(self, targets: Any, sendings: Any) -> None:
        self._send(targets, sendings)
        self._count += len(sendings)
        if self._count >= SENT_COUNT:
            die()

    def _making(self, call_index: int) -> None:
        if self._at == "known":
            self._made(call_index)
            threading.Event().wait(TELLING_S)
        die()

    def _telling(self, verdicts: Any) -> None:
        is_due = any(verdict.made == (self._at == "making") for _, verdict in verdicts)
        if not is_due:
            self._hand_out(verdicts)
            return
        self._hand_out([(rank, verdict) for rank, verdict in verdicts if rank == 1])
        threading.Event().wait(TELLING_S)
        die()


def die() -> None:
    """As kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    group: shardwell.Group,
    uid: int,
    stopped: threading.Event,
    *,
    size: int,
    retry: bool,
    ballast_bytes: int,
    death: Death | None,
) -> None:
    """Steps until `stopped`; a call that fails is begun again from the top of the step."""
    step, weights = np.zeros(1, np.int64), np.zeros(ELEMENT_COUNT)
    ballast = np.full(ballast_bytes, uid, np.uint8)
    state = {"step": step, "ballast": ballast, "weights": weights}
    while not stopped.wait(0.002):
        try:
            if death is not None:
                death.arm_state(group, int(step[0]))
            if group.broadcast_state(state):
                assert (ballast == ballast[:1]).all()
                say(given=int(step[0]), ballast=ballast[:1].tolist())
            now = int(step[0])
            array = np.full(size, 2.0**uid * factor_of(now), np.float32)
            if death is not None:
                death.arm(group, now)
            group.all_reduce(array, codec="fp32", retry=retry)
        except shardwell.ClosedError as error:
            say(over=error.message)
            return
        except shardwell.WorkerLostError as error:
            say(error=error.message)
            continue
        who = int(array[0]) // factor_of(now)
        assert (array == who * factor_of(now)).all(), array
        weights[:] = after(weights, who, now)
        step += 1
        say(
            step=now,
            who=who,
            crc=zlib.crc32(weights.tobytes()),
            rank=group.rank,
            size=group.size,
        )


def main() -> None:
    """Joins, trains, and leaves when its input ends."""
    target, uid, given = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    size, retry, dies = given.pop("element_count"), given.pop("retry"), given.pop("dies", None)
    ballast_bytes = given.pop("ballast_bytes", 0)
    death = None if dies is None else Death(**dies)
    stopped = threading.Event()

    def read() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=read, daemon=True).start()
    with shardwell.join_group("job", rendezvous=target, elastic=True, **given) as group:
        say(joined=group.size)
        train(
            group,
            uid,
            stopped,
            size=size,
            retry=retry,
            ballast_bytes=ballast_bytes,
            death=death,
        )


if __name__ == "__main__":
    main()
