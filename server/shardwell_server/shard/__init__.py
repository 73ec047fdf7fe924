"""One shard's work on its slices: steps, averaging, updates. No gRPC here."""
