"""The ownership of elements and rows by shards."""
