"""What one shard does with its slices: steps, averaging, update rules. No gRPC here."""
