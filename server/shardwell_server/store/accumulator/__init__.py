"""Sums of gradients by row in a mapped file: a library class, which needs no server."""

from shardwell_server.store.accumulator.gradient_accumulator import MmapGradientAccumulator

__all__ = ["MmapGradientAccumulator"]
