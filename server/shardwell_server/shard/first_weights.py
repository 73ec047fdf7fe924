"""Whose first weights stand: the state of one shard in docs/adr/0005-steps.md. Pure.

States: empty -> staged(epoch) -> standing(epoch). Shard 0 grants epochs and stands when its values
are complete; the others stage any epoch that is not older than what they have seen, and stand when
they are told that shard 0 does.

Invariants:
  - `epoch` never decreases; what stands is never written again.
  - A shard other than shard 0 stands only with complete values of the epoch that is confirmed.

Clocks are passed in. The caller holds the slice's lock.
"""

from __future__ import annotations

from typing import Any

from shardwell.errors import InitSupersededError, StepOrderError

_EPOCH_AHEAD_MS_MAX = 24 * 3600 * 1000
"""Clocks may differ by so much; a higher epoch would shut out those that shard 0 will grant."""


class FirstWeightsState:
    """One parameter's, on one shard."""

    def __init__(self, parameter: str, *, is_first_shard: bool, claim_s: float) -> None:
        self.standing = False
        """Whether first weights stand, so that gradients are taken."""
        self.epoch = 0
        """The newest that was granted or seen; when standing, that of the weights."""
        self.learning_rate: float | None = None
        """The rate that came with the values that are staged; it is theirs when they stand."""
        self._parameter = parameter
        self._is_first_shard = is_first_shard
        self._claim_s = claim_s
        self._staged_epoch = 0
        self._claim: tuple[str, float] | None = None

    @property
    def standing_epoch(self) -> int:
        """The epoch of the weights that stand; 0 if none do."""
        return self.epoch if self.standing else 0

    def facts(self) -> dict[str, Any]:
        """What must outlive the process: all but the claim, which is made again."""
        return {
            "epoch": self.epoch,
            "staged_epoch": self._staged_epoch,
            "standing": self.standing,
            "learning_rate": self.learning_rate,
        }

    def restore(
        self,
        *,
        epoch: int,
        staged_epoch: int,
        standing: bool,
        learning_rate: float | None = None,
    ) -> None:
        """Goes on from facts."""
        self.epoch, self._staged_epoch, self.standing = epoch, staged_epoch, standing
        self.learning_rate = learning_rate

    def stand_without(self) -> None:
        """Makes a parameter ready that needs no first weights."""
        self.standing = True

    def claim(self, worker_id: str, *, now_s: float, wall_ms: int) -> int | None:
        """Grants the right to set them: the epoch, or None while another worker has it.

        Epochs grow with the wall clock, so that a shard 0 that lost its memory never grants one
        that another shard may still have.
        """
        if self._claim is not None and self._claim[0] != worker_id and self._claim[1] > now_s:
            return None
        self._claim = (worker_id, now_s + self._claim_s)
        self.epoch = max(self.epoch + 1, wall_ms)
        return self.epoch

    def take(self, epoch: int, *, wall_ms: int) -> bool:
        """Whether values of an epoch are to be written; a repeat of what stands is not.

        Raises:
            InitSupersededError: a later epoch came in between.
            StepOrderError: other weights stand, or shard 0 did not grant the epoch.
        """
        if epoch < self.epoch or epoch < 1:
            raise InitSupersededError(
                f"first weights of {self._parameter!r}: epoch {epoch} came after epoch "
                f"{self.epoch}; call ClaimInit again",
                parameter=self._parameter,
            )
        if epoch > wall_ms + _EPOCH_AHEAD_MS_MAX:
            raise self._refused(epoch, "which is no epoch that shard 0 grants")
        if self.standing and epoch == self.epoch:
            return False
        if self.standing or (self._is_first_shard and epoch != self.epoch):
            raise self._refused(epoch, f"epoch {self.epoch} is the newest")
        self.epoch = epoch
        self._staged_epoch = 0
        return True

    def finish(self, epoch: int, learning_rate: float | None) -> None:
        """All values of an epoch are here, `take` having said that they are to be written."""
        self._staged_epoch = epoch
        self.learning_rate = learning_rate
        self.standing = self._is_first_shard

    def confirm(self, epoch: int) -> None:
        """Shard 0 stands with that epoch.

        Raises:
            StepOrderError: this shard has no complete values of it.
        """
        if self.standing and epoch == self.epoch:
            return
        if self.standing or self._is_first_shard or epoch != self._staged_epoch:
            raise self._refused(epoch, f"this shard has epoch {self._staged_epoch}")
        self.standing = True

    def _refused(self, epoch: int, reason: str) -> StepOrderError:
        return StepOrderError(
            f"first weights of {self._parameter!r}: epoch {epoch} is refused, {reason}; "
            "call ClaimInit on shard 0 and use its epoch",
            parameter=self._parameter,
        )
