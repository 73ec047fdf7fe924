"""What a shard, a table, a codec or a collective must come to, in plain NumPy and Python."""
