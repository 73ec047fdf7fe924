"""Groups for tests: ranks as threads, and a rendezvous without a wire."""
