"""Working memory of the codecs, one piece a thread, whatever it works on."""

from __future__ import annotations

import threading

from shardwell.numerics.codec import Scratch

# A global, because memory for each parameter and thread would grow with their product.
_OF_THREAD = threading.local()


def thread_scratch() -> Scratch:
    """The calling thread's; it is freed with the thread."""
    scratch: Scratch | None = getattr(_OF_THREAD, "value", None)
    if scratch is None:
        scratch = _OF_THREAD.value = Scratch()
    return scratch
