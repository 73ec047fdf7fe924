"""Becomes another program, after telling the keeper of its process group.

Run as a script, without site packages: `announced.py FD PROGRAM ARGV0 [ARGUMENT...]`. It tells the
keeper by itself, before there is anything to keep: if its parent told, it could be killed between
starting a worker and telling.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

NOT_FOUND_CODE = 127
NOT_EXECUTABLE_CODE = 126
"""Exit codes of shells for commands that can't be started."""


def main() -> None:
    """Does not return."""
    keeper_fd, program, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with contextlib.suppress(BrokenPipeError):
        os.write(keeper_fd, b"+%d\n" % os.getpid())
    os.close(keeper_fd)
    # Python ignores them, and what is ignored stays so in another program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(program, arguments)
    except OSError as error:
        print(f"can't start {program}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND_CODE if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE_CODE)


if __name__ == "__main__":
    main()
