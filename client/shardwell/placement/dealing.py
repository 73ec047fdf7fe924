"""The order of tensors in a parameter whose gradient comes piece by piece. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping


def dealt(sizes: Mapping[str, int], shard_count: int) -> list[str]:
    """The names in an order in which each shard's slice has in front what is ready first.

    They are dealt to the shards like cards, each to the shard that has the fewest elements so far;
    a parameter is the shards' hands, one behind the other. So the first tensors keep all shards
    busy. Slices are cut by size alone; no hand but the last is larger than a slice, so that no
    slice begins with the end of a hand, which is ready last.

    Args:
        sizes: Elements of each tensor, in the order in which gradients are ready.
        shard_count: Shards of the cluster.
    """
    hands: list[list[str]] = [[] for _ in range(shard_count)]
    counts = [0] * shard_count
    room = sum(sizes.values()) // shard_count
    for name, size in sizes.items():
        with_room = [i for i in range(shard_count - 1) if counts[i] + size <= room]
        index = min([*with_room, shard_count - 1], key=lambda i: counts[i])
        hands[index].append(name)
        counts[index] += size
    return [name for hand in hands for name in hand]
