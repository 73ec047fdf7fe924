"""The admin port of a shard: probes, metrics, and a page that says what the cluster waits for."""
