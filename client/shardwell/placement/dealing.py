"""The order of tensors in a parameter whose gradient comes tensor by tensor. Pure arithmetic.

Slices are contiguous and cut by size alone, and a tensor is contiguous too. So the order decides
what each slice begins with, and a slice that lies inside one tensor begins with that tensor.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import NamedTuple

from shardwell.placement.slices import slice_of
from shardwell.specs.parameter import block_size_of

_SMALL_PART = 8
"""A tensor of at most this part of a slice may lie across the end of a hand."""


class _Hand(NamedTuple):
    """The tensors of neighbouring slices; the hand with the most room sorts first."""

    full: int
    """Elements that it has, less those that it can have."""
    number: int
    slice_count: int
    names: list[str]


def dealt(sizes: Mapping[str, int], shard_count: int) -> list[str]:
    """The names in an order in which each shard's slice has in front what is ready first.

    1. Each slice is a hand. Tensors are dealt from the largest to the smallest, of equal ones the
       last that is ready first, each to the hand with the most room: so hands are filled evenly,
       and layers that repeat lie in all of them.
    2. A tensor that fits in no hand joins hands into one, of neighbouring slices, until it fits. A
       small one waits instead.
    3. Hands lie one behind the other, and small ones that waited fill what room is left before the
       end of each. A hand never reaches into the slice behind it, which would begin with what is
       ready last; the next one may begin a little before its slice.
    4. Within a hand, tensors lie in the order in which they are ready.

    Equal on every machine: workers that make one parameter at once must agree on it.
    """
    places = {name: place for place, name in enumerate(sizes)}
    total = sum(sizes.values())
    room = total // shard_count
    hands = [_Hand(-room, number, 1, []) for number in range(shard_count)]
    waiting: list[str] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], -places[name])):
        size = sizes[name]
        if hands[0].full + size > 0 and size * _SMALL_PART <= room:
            waiting.append(name)
            continue
        hand = heapq.heappop(hands)
        while hand.full + size > 0 and hands:
            other = heapq.heappop(hands)
            hand = _Hand(
                hand.full + other.full,
                hand.number,
                hand.slice_count + other.slice_count,
                hand.names + other.names,
            )
        hand.names.append(name)
        heapq.heappush(hands, hand._replace(full=hand.full + size))
    order: list[str] = []
    end = slice_count = 0
    hands.sort(key=lambda hand: min((places[name] for name in hand.names), default=math.inf))
    for hand in hands:
        slice_count += hand.slice_count
        stop = slice_of(total, slice_count - 1, shard_count, block_size_of(total)).stop
        end += sum(sizes[name] for name in hand.names)
        still: list[str] = []
        for name in waiting:
            if end + sizes[name] <= stop:
                hand.names.append(name)
                end += sizes[name]
            else:
                still.append(name)
        waiting = still
        order += sorted(hand.names, key=places.__getitem__)
    return order
