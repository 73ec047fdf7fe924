"""Every error that Shardwell raises, in one tree.

    ShardwellError
    ├── ArgumentError (ValueError)        a value that the caller passed
    │   └── NonFiniteError                NaN or infinity in it, with the index of the first
    ├── DivergedError                     weights that became NaN or infinite on the shards
    ├── SpecMismatchError                 the parameter exists with another spec
    ├── UnknownParameterError             no such parameter on a shard
    ├── UnknownTableError                 no such table on a shard
    ├── NotInitializedError               put or get before init()
    ├── InitSupersededError               another client took over setting first weights
    ├── StepOrderError                    a step that closed without this worker, or was skipped
    ├── OtherIncarnationError             a shard has other weights than this worker goes on with
    ├── SeatsTakenError                   worker_count other workers contribute already
    ├── WorkerIdInUseError                another process contributes under this worker's id
    ├── MembersAliveError                 delete() of what workers still use; it names them
    ├── CorruptChunkError                 a chunk whose CRC, length or index does not fit
    ├── WrongShardError                   an address leads to another shard or cluster
    ├── VersionMismatchError              the other side speaks another version of the wire contract
    ├── AuthenticationError (ConnectionError)  TLS or a token: one side does not believe the other
    ├── AccessDeniedError (PermissionError)    the token has no right to that
    ├── LimitError                        a named limit of a shard
    ├── StorageError                      files of a shard or a checkpoint: full disk, damaged
    ├── DeadlineError (TimeoutError)      no answer within the caller's deadline
    │   └── WorkersMissingError           ... because of other workers, which it names
    ├── ShardUnavailableError (ConnectionError)   a shard can't be reached, or did not come back
    │   └── SessionUnknownError           ... and does not know this client yet
    ├── GroupMismatchError                a group of that name has other settings
    ├── RankTakenError                    another worker has that rank, and lives
    ├── WorkerUnreachableError (ConnectionError)  a worker can't be reached by another of its group
    ├── WorkerLostError                   a worker of the group is gone
    ├── CollectiveMismatchError           ranks called different collectives, or with other arrays
    ├── ClosedError                       the client or group was closed
    │   ├── SessionEndedError             ... and a shard knows that it has ended
    │   └── ForkedError                   it was made in the process that this one was forked from
    └── InternalError                     a defect of Shardwell

Each carries what a program needs to act: `shard_index`, `worker_id`, `parameter`, `table`, `rank`
(None where they do not apply) and `retryable`, which is true when the same call may succeed later.
"""

from __future__ import annotations

from typing import Any


class ShardwellError(Exception):
    """The base of all errors of Shardwell.

    Examples:
        >>> try:
        ...     client.parameter("net", size=4, optimizer=shardwell.SGD(lr=0.5))
        ... except shardwell.ShardwellError as error:
        ...     type(error).__name__
        'SpecMismatchError'
    """

    retryable = False
    shard_index: int | None = None
    worker_id: str | None = None
    parameter: str | None = None
    table: str | None = None
    rank: int | None = None

    def __init__(self, message: str, **carried: Any) -> None:
        """Sets the attributes that are given; others keep the values that their class has."""
        super().__init__(message)
        for name, value in carried.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)

    @property
    def message(self) -> str:
        """The text: what, where, expected against got, and what to do."""
        return str(self.args[0])

    @message.setter
    def message(self, text: str) -> None:
        self.args = (text,)


class ArgumentError(ShardwellError, ValueError):
    """A value that the caller passed can't be used."""


class NonFiniteError(ArgumentError):
    """A gradient or weight that the caller passed is NaN or infinite; nothing of it was counted.

    `element_index` is the first such element's index in the parameter (0-based), or, of gradients
    of rows, in the array that was passed.
    """

    element_index: int = -1


class DivergedError(ShardwellError):
    """Weights on the shards are NaN or infinite: counted gradients left float32's range.

    Every gradient so far was counted. `element_index` is the first such element's index in the
    parameter (0-based); -1 in a table, whose row and column the message names.
    """

    element_index: int = -1


class SpecMismatchError(ShardwellError):
    """The parameter or table exists with another spec; the message lists the differences."""


class UnknownParameterError(ShardwellError):
    """The shard holds no parameter of that name."""


class UnknownTableError(ShardwellError):
    """The shard holds no table of that name."""


class NotInitializedError(ShardwellError):
    """No worker has given the parameter its first weights yet."""

    retryable = True


class InitSupersededError(ShardwellError):
    """Another client took over setting the first weights.

    `init_epoch` is the newest epoch that the shard has seen.
    """

    retryable = True

    init_epoch: int = 0


class StepOrderError(ShardwellError):
    """A step closed without this worker, the worker skipped one, or began it with other rows."""


class OtherIncarnationError(ShardwellError):
    """A shard has something else under the name than this worker has opened: it lost its memory.

    Or it was restored, and training began again. The message says which shard. Opening it again
    would go on with other weights, so that is for you to decide: start the worker anew.
    """


class SeatsTakenError(ShardwellError):
    """The parameter's `worker_count` seats belong to other workers."""


class WorkerIdInUseError(ShardwellError):
    """Another process contributes under this worker's id, or has taken its seat over.

    The message names both. All who wait for a worker that never came get it, too, where a second
    process asks for the seat of one that did. `free_in_s` is None while that process is connected;
    else a shard that was started again waits for it so much longer.
    """

    retryable = True

    free_in_s: float | None = None


class MembersAliveError(ShardwellError):
    """The parameter or table to delete has connected workers; nothing was deleted.

    The message names their processes; `member_worker_ids` are those that the shards know, of very
    many the first. `delete(force=True)` deletes it all the same.
    """

    retryable = True

    member_worker_ids: tuple[str, ...] = ()


class CorruptChunkError(ShardwellError):
    """A chunk's or request's CRC does not fit, or a chunk's length, index or offset."""

    retryable = True


class WrongShardError(ShardwellError):
    """An address leads to a shard with another index, count or cluster id."""


class VersionMismatchError(ShardwellError):
    """A shard, or a group's server, speaks another version of the wire contract than this process.

    The message names both. Install the same version of Shardwell everywhere.
    """


class AuthenticationError(ShardwellError, ConnectionError):
    """The two sides of a connection do not believe each other.

    One uses TLS and the other does not, a certificate is not believed, or the shard takes no call
    without a token, or not with this one; the message says which. `retryable` where the token was
    good before: a call has waited for another one in its file, until its deadline.
    """


class AccessDeniedError(ShardwellError, PermissionError):
    """The shard knows the token, which has no right to this call."""


class LimitError(ShardwellError):
    """A named limit of a shard would be exceeded."""


class StorageError(ShardwellError):
    """Files can't be written (disk full, not permitted) or believed (damaged).

    A shard's, or those of a checkpoint.
    """


class DeadlineError(ShardwellError, TimeoutError):
    """The deadline passed without an answer."""

    retryable = True


class WorkersMissingError(DeadlineError):
    """A step lacks workers that did not contribute before the deadline, or that have ended.

    A worker that has closed its client is not waited for: the error comes 1 s after that.
    `missing_worker_ids` are those that the shard knows by name; of very many, the first. In a
    group, `missing_ranks` are those that did not come.
    """

    missing_worker_ids: tuple[str, ...] = ()
    missing_ranks: tuple[int, ...] = ()


class ShardUnavailableError(ShardwellError, ConnectionError):
    """A shard can't be reached, is stopping, or went away in the middle of a call.

    Calls wait for it; this comes when it was not back at their deadline. The same call may then be
    made again, with the same client.
    """

    retryable = True


class SessionUnknownError(ShardUnavailableError):
    """A shard does not know this client's session, having been started again, say.

    The client tells the shard of its session and makes the call again by itself; this error comes
    when that did not succeed before the call's deadline.
    """


class GroupMismatchError(ShardwellError):
    """A group of that name has another size, strategy, codec or allow_non_finite.

    The message has both.
    """


class RankTakenError(ShardwellError):
    """Another worker has that rank in the group, and was heard of since."""


class WorkerUnreachableError(ShardwellError, ConnectionError):
    """A worker, whose rank is `rank`, can't be reached by another of its group."""

    retryable = True


class WorkerLostError(ShardwellError):
    """A worker of the group, whose rank is `rank`, is gone: it died, left, or can't be reached.

    The group's generation is at its end. `Group.rebuild` begins another with those who live.
    """


class CollectiveMismatchError(ShardwellError):
    """The ranks of a group called different collectives, or with different arrays.

    Every rank gets it, and no array was written.
    """


class ClosedError(ShardwellError):
    """The client or group, or the object that it was used for, is closed."""


class SessionEndedError(ClosedError):
    """The client's session has ended, by EndSession, and never attends or contributes again."""


class ForkedError(ClosedError):
    """A client, group, cluster or accumulator was made in the process that this was forked from.

    Its connections and threads stayed there. Make one in this process; the other goes on.
    """


class InternalError(ShardwellError):
    """A defect of Shardwell itself; the shard's log has the details."""
