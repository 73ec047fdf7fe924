"""A dense parameter, as a worker sees it."""
