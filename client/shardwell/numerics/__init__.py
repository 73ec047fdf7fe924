"""Arithmetic on arrays: codecs, sums, means and update rules. No I/O."""
