"""Processes of tests: commands, workers, members of groups, and a server that forks them."""
