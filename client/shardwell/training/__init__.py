"""Training loops on top: gradients made equal among workers, batches, and a trainer."""
