"""The store that keeps everything in memory, and ends with its process."""
