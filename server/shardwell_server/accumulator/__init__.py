"""Sums of gradients by row in a mapped file: a library class, which needs no server."""

from shardwell_server.accumulator.accumulator import MmapGradientAccumulator

__all__ = ["MmapGradientAccumulator"]
