"""A table of rows, as a worker sees it."""
