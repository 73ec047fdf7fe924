"""The first weights that are committed: the state of a shard in docs/adr/0005-steps.md. Pure.

States: empty -> staged(epoch) -> committed(epoch). Shard 0 grants epochs and commits when its
values are complete; the others stage any epoch that is not older than what they have seen, and
commit when they hear that shard 0 has.

Invariants:
  - `epoch` never decreases; what is committed is never written again.
  - A shard other than shard 0 commits only complete values of the epoch that is confirmed.

An epoch is a count and, below it, 32 bits that were drawn: no clock orders epochs, and no two are
the same, even where shard 0 has forgotten what it granted. It may then grant one that is lower than
what another shard has seen; that shard refuses it and says by which, and the next claim is above.

Time and randomness are passed in. The caller holds the slice's lock.
"""

from __future__ import annotations

from typing import Any

from shardwell.errors import ArgumentError, InitSupersededError, OtherIncarnationError

_DRAWN_BITS = 32
EPOCH_END = 2**63
"""Epochs are below it."""
_AHEAD_COUNT_MAX = 2**20
"""Claims that a shard may have missed; one that is further ahead was not granted by shard 0."""


class FirstWeightsState:
    """The state of one parameter's first weights on one shard."""

    def __init__(self, parameter: str, *, is_first_shard: bool, claim_s: float) -> None:
        self.is_committed = False
        self.epoch = 0
        """The newest that was granted or seen; when committed, that of the weights."""
        self.learning_rate: float | None = None
        """The rate that came with the values that are staged, and is committed with them."""
        self.load_id = 0
        """The one that came with the values that are staged or committed; 0: none."""
        self._parameter = parameter
        self._is_first_shard = is_first_shard
        self._claim_s = claim_s
        self._staged_epoch = 0
        self._claim: tuple[str, float] | None = None

    @property
    def committed_epoch(self) -> int:
        """The epoch of the weights that are committed; 0 if none are."""
        return self.epoch if self.is_committed else 0

    def facts(self) -> dict[str, Any]:
        """Returns the facts that outlive the process: all but the claim, which is made again."""
        return {
            "epoch": self.epoch,
            "staged_epoch": self._staged_epoch,
            "is_committed": self.is_committed,
            "learning_rate": self.learning_rate,
            "load_id": self.load_id,
        }

    def restore(
        self,
        *,
        epoch: int,
        staged_epoch: int,
        is_committed: bool,
        learning_rate: float | None = None,
        load_id: int = 0,
    ) -> None:
        self.epoch, self._staged_epoch, self.is_committed = epoch, staged_epoch, is_committed
        self.learning_rate, self.load_id = learning_rate, load_id

    def commit_without(self) -> None:
        """Makes a parameter ready that needs no first weights."""
        self.is_committed = True

    def claim(self, worker_id: str, *, now_s: float, drawn: int, above: int = 0) -> int | None:
        """Grants the right to set them: the epoch, or None while another worker has it.

        `now_s` is a monotonic clock of this process, `drawn` is below 2^32, and `above` is the
        newest epoch that another shard has seen, if the caller knows.
        """
        count = (max(self.epoch, above) >> _DRAWN_BITS) + 1
        epoch = count << _DRAWN_BITS | drawn
        if epoch >= EPOCH_END:
            raise ArgumentError(
                f"first weights of {self._parameter!r}: no epoch is above {above}, and shards see "
                f"none from {EPOCH_END} on"
            )
        if self._claim is not None and self._claim[0] != worker_id and self._claim[1] > now_s:
            return None
        self._claim = (worker_id, now_s + self._claim_s)
        self.epoch = epoch
        return epoch

    def take(self, epoch: int) -> bool:
        """Returns True if values of an epoch are to be written, not a repeat of committed ones."""
        if epoch < self.epoch or epoch < 1:
            raise InitSupersededError(
                f"first weights of {self._parameter!r}: epoch {epoch} came after epoch "
                f"{self.epoch}; call ClaimInit again",
                init_epoch=self.epoch,
                parameter=self._parameter,
            )
        ahead = (epoch >> _DRAWN_BITS) - (self.epoch >> _DRAWN_BITS)
        if ahead > _AHEAD_COUNT_MAX or epoch >= EPOCH_END:
            raise self._refused(epoch, "which is no epoch that shard 0 grants")
        if self.is_committed and epoch == self.epoch:
            return False
        if self.is_committed or (self._is_first_shard and epoch != self.epoch):
            raise self._refused(epoch, f"epoch {self.epoch} is the newest")
        self.epoch = epoch
        self._staged_epoch = 0
        return True

    def finish(self, epoch: int, learning_rate: float | None, load_id: int = 0) -> None:
        """Stages an epoch's values, all written after `take`; shard 0 commits them at once."""
        self._staged_epoch = epoch
        self.learning_rate, self.load_id = learning_rate, load_id
        self.is_committed = self._is_first_shard

    def confirm(self, epoch: int) -> None:
        """Commits the staged epoch that shard 0 has committed."""
        if self.is_committed and epoch == self.epoch:
            return
        if self.is_committed or self._is_first_shard or epoch != self._staged_epoch:
            raise self._refused(epoch, f"this shard has epoch {self._staged_epoch}")
        self.is_committed = True

    def _refused(self, epoch: int, reason: str) -> OtherIncarnationError:
        return OtherIncarnationError(
            f"first weights of {self._parameter!r}: epoch {epoch} is refused, {reason}; "
            "call ClaimInit on shard 0 and use its epoch",
            parameter=self._parameter,
        )
