"""The meeting place of a group's members, on the first shard, and their leases."""
