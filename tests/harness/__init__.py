"""What several tests share, by purpose."""
