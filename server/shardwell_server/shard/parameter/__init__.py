"""One shard's part of a parameter."""
