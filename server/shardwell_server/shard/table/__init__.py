"""One shard's part of a table."""
