"""What benchmarks run beside each other; a package, as peers.py beside it would be found first."""
