"""A worker's steps on shards, of parameters and tables alike."""
