"""`python -m shardwell_server` is the command `shardwell`."""

from shardwell_server.cli import main

if __name__ == "__main__":
    main()
