"""The storage of a shard's weights, sums and optimizer state. One contract, several kinds."""
