"""What several tests share: an oracle, a worker from the .proto alone, a faulty wire, leak checks."""
