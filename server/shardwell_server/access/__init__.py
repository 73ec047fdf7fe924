"""The rights of callers: tokens and what they may do, and the log of it."""
