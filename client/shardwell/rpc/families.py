"""Families of fragments, as all shards together have them: to show, save and delete as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwell.rpc.shard_status import LearnerStatus, ParameterStatus

_LISTED_MAX = 16
"""Versions that are spelled out one by one."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parameters that say that they are fragments of one family."""

    name: str
    """The family's."""
    parts: Mapping[int, tuple[ParameterStatus, ...]]
    """By the fragment's index, in order, what each shard has of it; those that no shard has are
    left out."""

    @property
    def count(self) -> int:
        """How many fragments it is to have."""
        return max(
            part.spec.fragment.count
            for parts in self.parts.values()
            for part in parts
            if part.spec.fragment is not None
        )

    @property
    def lacking(self) -> list[int]:
        """Fragments that no shard has."""
        return [index for index in range(self.count) if index not in self.parts]

    @property
    def names(self) -> list[str]:
        """Of its parameters, in order."""
        return [parts[0].spec.name for parts in self.parts.values()]

    @property
    def versions(self) -> list[int | None]:
        """Outer steps that each fragment has seen; None: no shard has it."""
        return [
            _version(self.parts[index]) if index in self.parts else None
            for index in range(self.count)
        ]

    @property
    def due(self) -> tuple[ParameterStatus, ...]:
        """The fragment of the lowest version, the first of several: what learners give next."""
        return min(self.parts.values(), key=_version)

    @property
    def size(self) -> int:
        """Elements of all fragments that there are."""
        return sum(parts[0].spec.size for parts in self.parts.values())

    @property
    def learners(self) -> list[LearnerStatus]:
        """What learners said of themselves last, by worker."""
        found = {
            learner.worker_id: learner
            for parts in self.parts.values()
            for part in parts
            for learner in part.learners
        }
        return [found[worker_id] for worker_id in sorted(found)]

    def versions_words(self) -> str:
        """Such as "versions 12 12 11 11"; "-": of one that no shard has."""
        versions = self.versions
        known = [each for each in versions if each is not None]
        if len(versions) > _LISTED_MAX:
            words = f"versions {min(known)} to {max(known)} of {len(versions)} fragments"
            missing = f", of which {len(self.lacking)} are missing" if self.lacking else ""
            return words + missing
        listed = " ".join("-" if each is None else str(each) for each in versions)
        return f"version{'s' * (len(versions) > 1)} {listed}"


def families_of(parameters: Iterable[ParameterStatus]) -> dict[str, Family]:
    """The families that parameters on all shards are fragments of, by name, in order."""
    found: dict[str, dict[int, list[ParameterStatus]]] = {}
    for each in parameters:
        fragment = each.spec.fragment
        if fragment is not None:
            found.setdefault(fragment.family, {}).setdefault(fragment.index, []).append(each)
    return {
        name: Family(name=name, parts={i: tuple(parts) for i, parts in sorted(by_index.items())})
        for name, by_index in sorted(found.items())
    }


def _version(parts: tuple[ParameterStatus, ...]) -> int:
    """Of the shard that is furthest behind, of those that have elements of it."""
    return min(
        (part.version_min for part in parts if part.slice_size), default=parts[0].version_min
    )
