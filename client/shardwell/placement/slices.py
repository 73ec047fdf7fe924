"""The owner of each element, and the cutting of a slice into chunks. Pure arithmetic.

Source: BigDL's AllReduceParameter (Dai et al., 2018), with blocks in place of elements: the first
`block_count % shard_count` slices are one block longer than the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Slice:
    """A contiguous range of a parameter's elements.

    Examples:
        >>> shardwell.Slice(offset=336, size=314).stop
        650
    """

    offset: int
    """First element, counted from the start of the parameter."""
    size: int
    """Number of elements; 0 when the parameter has fewer blocks than the cluster shards."""

    @cached_property
    def stop(self) -> int:
        """One past the last element."""
        return self.offset + self.size

    def chunk_count(self, chunk_element_count: int) -> int:
        """The number of chunks of at most `chunk_element_count` elements into which it is cut."""
        return -(-self.size // chunk_element_count)

    def chunk(self, chunk_index: int, chunk_element_count: int) -> Slice:
        """The chunk's range, in elements of the whole parameter.

        Raises:
            IndexError: there is no such chunk.
        """
        start = chunk_index * chunk_element_count
        if chunk_index < 0 or start >= self.size:
            raise IndexError(chunk_index)
        return Slice(self.offset + start, min(chunk_element_count, self.size - start))


def slice_of(size: int, shard_index: int, shard_count: int, block_size: int = 1) -> Slice:
    """The slice of a parameter of `size` elements that shard `shard_index` owns.

    Args:
        size: Elements of the parameter.
        shard_index: The shard.
        shard_count: Shards of the cluster.
        block_size: Elements that stay together: blocks are dealt in place of elements, and the last
            may be shorter. A parameter's is `net.spec.slice_unit`, and `net.slices` has its slices.

    Raises:
        ValueError: size below 0, or an index outside 0..shard_count-1.

    Examples:
        >>> shardwell.slice_of(650, shard_index=1, shard_count=2, block_size=16)
        Slice(offset=336, size=314)
    """
    if size < 0 or not 0 <= shard_index < shard_count:
        raise ValueError(f"no slice {shard_index} of {shard_count} of a parameter of size {size}")
    task, extra = divmod(-(-size // block_size), shard_count)
    first = shard_index * task + min(shard_index, extra)
    stop = first + task + (1 if shard_index < extra else 0)
    offset = min(first * block_size, size)
    return Slice(offset=offset, size=min(stop * block_size, size) - offset)
