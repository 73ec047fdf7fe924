"""What several tests share: an oracle, a wire worker, a faulty wire, programs, leak checks."""
