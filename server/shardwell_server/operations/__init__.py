"""The arithmetic and the records of running a cluster: status, last steps, plans, certificates."""
