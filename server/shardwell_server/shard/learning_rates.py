"""The learning rate of each update of a parameter, as clients change it. Pure."""

from __future__ import annotations


class LearningRates:
    """The rate of each update: the spec's, and the changes that clients ask for."""

    def __init__(self, learning_rate: float) -> None:
        self._changes: list[tuple[int, float]] = [(0, learning_rate)]

    def __len__(self) -> int:
        return len(self._changes)

    @property
    def changes(self) -> list[tuple[int, float]]:
        return list(self._changes)

    def at(self, version: int) -> float:
        """Returns the rate of the update that follows `version` updates."""
        for from_step, rate in reversed(self._changes):
            if from_step <= version:
                return rate
        return self._changes[0][1]

    def change(self, from_step: int, learning_rate: float) -> None:
        """Sets the rate from an update on, and forgets changes that were to come later."""
        kept = [change for change in self._changes if change[0] < from_step]
        self._changes = [*kept, (from_step, learning_rate)]

    def prune(self, version_min: int) -> None:
        """Forgets what no chunk will need any more, all having seen `version_min` updates."""
        needed = [i for i, (start, _) in enumerate(self._changes) if start <= version_min]
        self._changes = self._changes[needed[-1] if needed else 0 :]
