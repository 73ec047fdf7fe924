"""Makes one call: python -m harness.programs.forked_call PICKLED, a function and its arguments.

What it prints leaves line by line; the process ends without Python's own end, as its threads may
still be at work.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback


def main() -> None:
    """The call; exit code 1 if it raises."""
    sys.stdout.reconfigure(line_buffering=True)
    function, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
