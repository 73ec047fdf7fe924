"""Calls to shards: what is asked, deadlines, sessions and retries."""
