"""Connections to shards: channels, streams, sessions, deadlines and retries."""
