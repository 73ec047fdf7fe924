"""Families of fragments, as all shards together have them: to show, save and delete as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import LearnerStatus, ParameterStatus, ask_parameters
from shardwell.specs.fragments import Deal, deals_of, versions_words
from shardwell.threads.asking import ask_all


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parameters that say that they are fragments of one family."""

    name: str
    """The family's."""
    parts: Mapping[int, tuple[ParameterStatus, ...]]
    """By the fragment's index, in order, what each shard has of it; those that no shard has are
    left out."""

    @cached_property
    def count(self) -> int:
        """How many fragments it is to have."""
        return self.deal.count

    @property
    def deal(self) -> Deal:
        """Its fragments, as their specs have them."""
        specs = [part.spec for parts in self.parts.values() for part in parts]
        return deals_of(spec.fragment for spec in specs)[self.name]

    @property
    def lacking(self) -> list[int]:
        """Fragments that no shard has."""
        return self.deal.lacking

    @property
    def names(self) -> list[str]:
        """Names of its parameters, in order."""
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
        """The versions of its fragments, for a person to read."""
        return versions_words(self.versions)


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


def find_family(name: str, channels: Sequence[ShardChannel], attempts: Attempts) -> Family | None:
    """The family of that name on a cluster; None: no shard has a fragment of it.

    Raises:
        ShardUnavailableError, DeadlineError: a shard does not answer.
    """
    statuses = ask_all(
        channels,
        lambda channel: attempts.beside().run(lambda: ask_parameters(channel, attempts.rest_s)),
    )
    found = [
        ParameterStatus.from_proto(each)
        for status in statuses
        for each in status.parameters
        if each.spec.HasField("fragment") and each.spec.fragment.family == name
    ]
    return families_of(found).get(name)


def _version(parts: tuple[ParameterStatus, ...]) -> int:
    """Version of the shard that is furthest behind, of those that have elements of it."""
    return min(
        (part.version_min for part in parts if part.slice_size), default=parts[0].version_min
    )
