"""A worker's calls about a parameter or table as a whole. All are safe to repeat, and repeated.

Shard 0 says which one of the name the cluster has, and whether it has begun; the others follow. A
shard that has another, or none, lost its memory.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from shardwell.errors import CorruptChunkError, DeadlineError
from shardwell.rpc.heartbeat import Membership
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.take_over import check_next_step, claim_seat, common_tenure
from shardwell.specs.parameter import TrainingSpec
from shardwell.threads.asking import ask_all

ResponseT = TypeVar("ResponseT", bound=Message)


_JOIN_PAUSE_S = 0.05
"""The pause before a member whose tenure a shard has ended meanwhile begins another."""


class Ranking(NamedTuple):
    """The rank of a worker among those that make a step."""

    rank: int
    worker_count: int


SpecT = TypeVar("SpecT", bound=TrainingSpec)
AnswerT = TypeVar("AnswerT", bound=Any)


@dataclass(frozen=True)
class KindCalls(Generic[AnswerT]):
    """The names on the wire of the calls about one kind."""

    kind: str
    """"parameter" or "table"; requests and errors have a field of that name."""
    join: tuple[str, Callable[..., Any], type[AnswerT]]
    """The method that creates or joins one, its request and its response."""
    set_rate: tuple[str, Callable[..., Any], type[Any]]


class Opening(Generic[SpecT, AnswerT]):
    """The owner of the named incarnation and this worker's tenure. Any thread may use it."""

    calls: KindCalls[AnswerT]

    def __init__(self, spec: SpecT, channels: list[ShardChannel], worker_id: str = "") -> None:
        self.spec = spec
        self._channels = channels
        self.worker_id = worker_id
        self.of: dict[str, Any] = {self.calls.kind: spec.name}
        """The field of requests and errors that names it."""
        self.what = f"{self.calls.kind} {spec.name!r}"
        """Its kind and name, for messages."""
        self.incarnation = 0
        """The number that tells it from others of its name; 0: nothing is open yet."""
        self.tenure = 0
        """Tenure of this worker's seats, for gradients and streams; 0: none, or for good."""
        self.from_step = 0
        """The first step that any shard awaits this elastic member in."""
        self.whole_from = 0
        """The first step that all shards await it in; higher where some shard needs it for a step
        that others have closed."""
        self.membership: Membership | None = None
        """The tenure as heartbeats name it, of a worker that was an elastic member."""
        self.has_seat = False
        """True if this worker had a seat when it opened: an earlier process of it contributed."""
        self._opened_in = 0

    @property
    def shard_count(self) -> int:
        """The number of shards of the cluster."""
        return len(self._channels)

    def damaged(self, channel: ShardChannel, deed: str) -> CorruptChunkError:
        """Returns the error for a damaged answer; `deed` says what its shard has done."""
        index = channel.shard_index
        return CorruptChunkError(f"shard {index} {deed}", shard_index=index, **self.of)

    def join_all(
        self,
        attempts: Attempts,
        *,
        tenure: int = 0,
        begins_anew: bool = False,
        from_step: int | None = None,
        incarnation: int = 0,
    ) -> list[AnswerT]:
        """Creates or joins it on shard 0, then on all others at once: one attempt.

        With a `tenure` above 0 the worker takes its seat for that tenure. An `incarnation` above 0
        names one that must exist. CreateParameterRequest says the rest.
        """
        method, request_type, response_type = self.calls.join
        takes_seat = tenure > 0

        def join(
            channel: ShardChannel, spec: Any, *, incarnation: int, must_exist: bool
        ) -> AnswerT:
            channel.has_seats |= takes_seat
            request = request_type(
                shard=channel.identity,
                worker_id=self.worker_id,
                spec=spec.to_proto(),
                take_seat=takes_seat,
                incarnation=incarnation,
                must_exist=must_exist,
                session=channel.session.number,
                tenure=tenure,
                begins_anew=begins_anew,
                from_step=from_step,
            )
            return channel.call(
                method, request, response_type, timeout_s=attempts.rest_s, **self.of
            )

        is_known = incarnation > 0 and not takes_seat
        asked = self._first_spec()
        first = join(self._channels[0], asked, incarnation=incarnation, must_exist=is_known)
        self._learn(first)
        others = partial(
            join, spec=self.spec, incarnation=first.incarnation, must_exist=first.begun
        )
        return [first, *ask_all(self._channels[1:], others)]

    def _first_spec(self) -> SpecT:
        return self.spec

    def _learn(self, first: AnswerT) -> None:
        """Takes over what shard 0 alone knows of the spec, before the others are asked."""

    def rank(self, attempts: Attempts, *, takes_seat: bool) -> Ranking:
        """Returns this worker's rank on shard 0; may run beside other calls.

        With `takes_seat` the rank is that of a seat that is kept for good, and taken now.
        """
        ask = partial(self.join_all, attempts, incarnation=self.incarnation)
        if takes_seat:
            tenure = secrets.randbits(63) + 1
            answers = claim_seat(attempts, partial(ask, tenure=tenure))
        else:
            answers = attempts.run(ask)
        return Ranking(answers[0].rank, answers[0].ranked_count)

    def _seated(self, attempts: Attempts) -> list[AnswerT]:
        tenure = secrets.randbits(63) + 1
        take = partial(self.join_all, attempts, tenure=tenure, incarnation=self.incarnation)
        answers = claim_seat(attempts, take)
        if len({answer.tenure for answer in answers}) > 1:  # some were given away, and others not
            answers = claim_seat(attempts, partial(take, begins_anew=True))
        return answers

    def _check_seat(self, answers: list[AnswerT], next_step: int, opened_at: int) -> int:
        """Returns the tenure of the seats that this worker has taken; refuses lost steps."""
        tenure = common_tenure(answer.tenure for answer in answers)
        check_next_step(
            self.what,
            next_step,
            opened_at,
            took_over=any(answer.took_over for answer in answers),
            lost_seat=self._opened_in not in (0, tenure),
            **self.of,
        )
        return tenure

    def join_members(self, attempts: Attempts, from_step: int | None = None) -> int:
        """Has all shards await this elastic member from one step on; returns the step.

        Where its tenure goes on, it was to be awaited from `from_step`, and the step is agreed on
        anew: a lower one, if a shard has an open step that needs it.
        """
        ahead, tenure = 1, self.tenure
        while True:
            if attempts.remaining_s <= 0:
                raise DeadlineError(
                    f"{self.what}: worker {self.worker_id!r} is no member after "
                    f"{attempts.timeout_s:g} s: each time a shard had ended its tenure, or steps "
                    "closed faster than it joined; call again, or raise timeout_s",
                    worker_id=self.worker_id,
                    **self.of,
                )
            if from_step is None:
                tenure = secrets.randbits(63) + 1
            join = partial(self._join_members, attempts, tenure, from_step)
            answers = claim_seat(attempts, join)
            if common_tenure(answer.tenure for answer in answers) != tenure:
                from_step = None  # a shard has found meanwhile that it is over
                attempts.pause(_JOIN_PAUSE_S)
                continue
            needed = [each.needed_step for each in answers if each.HasField("needed_step")]
            newest = max(self._newest(answer) for answer in answers)
            wanted: int
            if needed:
                wanted = min(needed)
            elif from_step is None or newest > from_step:
                wanted, ahead = newest + ahead, 2 * ahead
            else:
                wanted = from_step
            if wanted == from_step:
                self.tenure = tenure
                self.from_step, self.whole_from = wanted, max(wanted, newest)
                self.membership = Membership(
                    self.calls.kind, self.spec.name, self.incarnation, self.worker_id, tenure
                )
                return wanted
            from_step = wanted

    def _join_members(
        self, attempts: Attempts, tenure: int, from_step: int | None
    ) -> list[AnswerT]:
        return self.join_all(
            attempts, tenure=tenure, from_step=from_step, incarnation=self.incarnation
        )

    @staticmethod
    @abstractmethod
    def _newest(answer: AnswerT) -> int:
        """Returns the most updates that a part of a shard has seen."""

    @abstractmethod
    def first_step_ahead(self, next_step: int, attempts: Attempts) -> int:
        """Returns the first step from `next_step` on that no shard has passed.

        That is this worker's next step, or, when that was interrupted and some shards closed it,
        the one after it. A worker that takes part is never further behind; StepOrderError says that
        it is.
        """

    def set_learning_rate(
        self, learning_rate: float, from_step: int | None, attempts: Attempts
    ) -> None:
        """Changes the rate on all shards; `from_step` None: at once."""
        method, request_type, response_type = self.calls.set_rate
        self._tell_each(
            method,
            lambda channel: request_type(
                shard=channel.identity,
                learning_rate=learning_rate,
                from_step=from_step,
                incarnation=self.incarnation,
                **self.of,
            ),
            response_type,
            attempts,
        )

    def _tell_each(
        self,
        method: str,
        request: Callable[[ShardChannel], Any],
        response_type: type[ResponseT],
        attempts: Attempts,
    ) -> list[ResponseT]:
        """Returns the answers of all shards, in order; where one refuses, no later is asked."""

        def tell(channel: ShardChannel) -> ResponseT:
            return channel.call(
                method, request(channel), response_type, timeout_s=attempts.rest_s, **self.of
            )

        return [attempts.run(partial(tell, channel)) for channel in self._channels]
