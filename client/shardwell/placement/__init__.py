"""Which shard owns which elements and rows."""
