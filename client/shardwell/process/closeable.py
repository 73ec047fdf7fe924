"""What holds something until the end of a `with` block."""

from __future__ import annotations

from typing import Self


class Closing:
    """A context manager that closes itself on exit, whether the block failed or not."""

    def close(self) -> None:
        """Lets go of what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
