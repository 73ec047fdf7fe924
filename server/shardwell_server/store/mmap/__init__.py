"""The store in memory-mapped files, which survives kill -9."""
