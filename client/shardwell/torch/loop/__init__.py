"""A plain training loop of PyTorch on a cluster: its optimizer, its data, its callbacks."""
