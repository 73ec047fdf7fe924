"""Damaged files: what a shard says, or does, that finds a story's so."""

from __future__ import annotations

from pathlib import Path

from harness.stories.crash import Written
from harness.stories.images import restore
from harness.stories.killed import StoredStory
from shardwell.errors import StorageError


class Damage:
    """Tries damages of the files of one moment, one at a time, and counts how they ended.

    Args:
        written: The moment.
        path: Where the files are put.
        directory: To which names are relative.
    """

    def __init__(
        self, story: StoredStory, written: Written, path: Path, directory: str = ""
    ) -> None:
        self.path = restore(written.image, path)
        self.image = written.image
        self.refused_count = self.harmless_count = 0
        self._story = story
        self._answered_count = written.answered_count
        self._directory = directory

    def of(self, name: str, contents: bytes | None, what: str) -> str | None:
        """What a shard says that finds a file so (None: not at all); None if it does no harm."""
        if contents is not None and contents == self.contents(name):
            return None
        file = self.path / self._directory / name
        if contents is None:
            file.unlink()
        else:
            file.write_bytes(contents)
        message = None
        try:
            self._story.check_goes_on(
                self.path, self._answered_count, f"{name}: {what}", is_whole=False
            )
        except StorageError as error:
            message = str(error)
            assert str(self.path / self._directory) in message, f"{name}, {what}: {message}"
        except BaseException as error:
            error.add_note(f"{name}: {what}")
            raise
        finally:
            restore(self.image, self.path)
        self.refused_count += message is not None
        self.harmless_count += message is None
        return message

    def contents(self, name: str) -> bytearray:
        """Of a file, undamaged."""
        full_name = f"{self._directory}/{name}" if self._directory else name
        return bytearray(self.image[full_name] or b"")

    def flip(self, name: str, offset: int) -> str | None:
        """One bit of a byte, a different one for each."""
        contents = self.contents(name)
        contents[offset] ^= 1 << (offset * 3 % 8)
        return self.of(name, bytes(contents), f"a bit of byte {offset}")

    def zero(self, name: str, start: int, stop: int) -> str | None:
        """Writes zeros over a range."""
        contents = self.contents(name)
        contents[start:stop] = bytes(len(contents[start:stop]))
        return self.of(name, bytes(contents), f"zeros in [{start}, {stop})")
