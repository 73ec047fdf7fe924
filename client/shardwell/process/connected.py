"""A holder of connections and threads of its process: it is closed, never copied or pickled."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from typing_extensions import override

from shardwell.errors import ArgumentError


class Connected:
    """Refuses to be copied or pickled, with what to do in the other process."""

    _elsewhere = "call shardwell.connect in the other process"

    @override
    def __reduce__(self) -> NoReturn:
        raise self._not_copied()

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self._not_copied()

    def _not_copied(self) -> ArgumentError:
        return ArgumentError(
            f"{type(self).__name__} can't be copied or pickled: its connections are those of this "
            f"process; {self._elsewhere}"
        )


class Closing:
    """A context manager that closes itself on exit, whether the block failed or not."""

    def close(self) -> None:
        """Lets go of what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
