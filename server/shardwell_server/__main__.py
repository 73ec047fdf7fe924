"""`python -m shardwell_server`, which is the command `shardwell`."""

from shardwell_server.processes import signals


def main() -> None:
    """Runs the command, with signals held before anything else is imported."""
    signals.hold()
    from shardwell_server import cli

    cli.main()


if __name__ == "__main__":
    main()
