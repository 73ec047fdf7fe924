"""The program's end: what is open then is closed after all else that a program does there.

Python calls atexit handlers in the reverse order of their registration, and `weakref.finalize`
registers the one that closes clients when it is used first. It is used here, when Shardwell is
imported, so that handlers which a program registers later run before that, with clients that work.
"""

from __future__ import annotations

import atexit
import threading
import weakref

from shardwell.errors import ClosedError

_begun = threading.Event()
# The only effects of an import of Shardwell: both have to be registered before what users register.
weakref.finalize(_begun, int)  # what it calls does nothing
atexit.register(_begun.set)


leaving = threading.Event()
"""Set once SIGTERM has asked the program to leave, and a `LeaveRequest` has noted it."""


def is_in_order(error: object) -> bool:
    """True if a `with` block that ends with this error, or None, ends a worker that leaves.

    Any other error ends it as the death of the process would: others wait for it to come back.
    """
    return error is None or isinstance(error, SystemExit) or leaving.is_set()


_END_WORDS = "interpreter shutdown"
"""In Python's own error, of 3.12 on, where a thread is started while the interpreter ends."""


def has_main_ended() -> bool:
    """True if the main thread has: Python 3.12 and later start no thread from then on."""
    return not threading.main_thread().is_alive()


def named(error: BaseException, what: str) -> BaseException:
    """Returns the error; ClosedError about `what` where it says that the interpreter ends."""
    if isinstance(error, RuntimeError) and _END_WORDS in str(error):
        return ClosedError(
            f"{what} needs a thread, and Python starts none while the interpreter ends; call it "
            "before the main thread ends"
        )
    if isinstance(error, RuntimeError) and isinstance(error.__context__, KeyboardInterrupt):
        return error.__context__  # threading's locks were interrupted, and say so
    return error


def closed_text(what: str, cure: str) -> str:
    """Says that `what` was closed, and a cure, unless the interpreter's end closed it."""
    if _begun.is_set():
        return (
            f"{what} was closed, because the interpreter ends; call it before the program ends, "
            "or from an atexit handler that is registered after `import shardwell`"
        )
    return f"{what} was closed; {cure}"
