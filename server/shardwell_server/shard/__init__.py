"""What one shard does with its slices: steps, averaging, updates. No gRPC here."""
