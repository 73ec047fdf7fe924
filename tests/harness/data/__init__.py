"""What tests train and store: plans, batches, rows, manifests, sessions."""
