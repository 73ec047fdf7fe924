"""What all shards of a cluster say of themselves, as notebooks show it."""

from __future__ import annotations

from collections.abc import Iterable

from shardwell.process.html_table import html_table
from shardwell.rpc.families import families_of
from shardwell.rpc.shard_status import ShardStatus


class ClusterStatus(list[ShardStatus]):
    """What each shard of a cluster says of itself, in order: a list, which notebooks show whole."""

    def _repr_html_(self) -> str:
        shards = html_table(
            f"cluster {self[0].cluster_id}" if self else "no shards",
            ("shard", "address", "serving since", "stored", "troubles"),
            [
                (
                    f"{each.shard_index} of {each.shard_count}",
                    each.address,
                    f"{each.uptime_s:.0f} s",
                    f"{each.stored_bytes / 1e6:.1f} MB",
                    "; ".join(map(str, each.troubles)),
                )
                for each in self
            ],
        )
        held: dict[tuple[str, str], list[tuple[int, tuple[str, ...]]]] = {}
        for shard in self:
            for parameter in shard.parameters:
                if parameter.slice_size and parameter.spec.fragment is None:
                    said = (parameter.version_min, parameter.missing_worker_ids)
                    held.setdefault(("parameter", parameter.spec.name), []).append(said)
            for table in shard.tables:
                said = (table.version, table.missing_worker_ids)
                held.setdefault(("table", table.spec.name), []).append(said)
        rows: list[tuple[str, str, str, str]] = [
            (*key, str(min(version for version, _ in parts)), _names(names for _, names in parts))
            for key, parts in held.items()
        ]
        families = families_of(parameter for shard in self for parameter in shard.parameters)
        for family in families.values():
            missing = _names(part.missing_worker_ids for part in family.due)
            rows.append(("family", family.name, family.versions_words(), missing))
        held_table = html_table(
            "parameters and tables", ("kind", "name", "step", "has yet to come"), sorted(rows)
        )
        learners = [
            (
                family.name,
                each.worker_id,
                each.progress.inner_steps,
                each.progress.sample_count,
                f"{each.progress.hidden_s:.1f} s",
                f"{each.progress.waited_s:.1f} s",
                f"{each.ago_s:.0f} s ago",
            )
            for family in families.values()
            for each in family.learners
        ]
        if not learners:
            return shards + held_table
        columns = ("family", "learner", "inner steps", "samples", "hidden", "waited", "said")
        return shards + held_table + html_table("learners", columns, learners)


def _names(worker_ids: Iterable[Iterable[str]]) -> str:
    return ", ".join(sorted({name for names in worker_ids for name in names}))
