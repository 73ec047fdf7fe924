"""Where members of a group meet, on the first shard, and what keeps them in it."""
