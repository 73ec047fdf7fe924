"""Numbers of what files and messages look like; each rises with a change of what it numbers. Pure.

A reader checks a number before it reads anything else of a file, and refuses one that it does not
know by name. tests/data/releases/formats.json has what each number means, as digests and names of
fields, and says which of them a release has: such a format never changes again.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from shardwell.errors import StorageError


class Format(NamedTuple):
    """A kind of file, and the numbers of its formats that this version reads."""

    newest: int
    """The number that this version writes."""
    oldest: int
    """The lowest number that this version reads."""
    advice: str
    """A message's advice about a file of another format."""

    def check(self, where: object, found: Any, written_by: object = None) -> None:
        """Refuses a number that this version does not read."""
        if type(found) is int and self.oldest <= found <= self.newest:
            return
        here = str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        by = f", written by shardwell {written_by!s:.40}" if written_by else ""
        raise StorageError(
            f"{where} has format {found!r:.40}{by}; shardwell {software_version()} here reads "
            f"format {here}: {self.advice}"
        )


_OLDER = "run the version of shardwell that wrote it, or a later one"
DIRECTORY = Format(3, 1, f"{_OLDER}, or restore a checkpoint into an empty directory")
"""Everything in a data directory. shard.json has the number, and each parameter.json and
table.json that of the files beside it. 1: 0.1.0 and 0.2.0, whose files differ; those of 0.1.0 lack
what it did not keep, and are read. 2: shard.json has shardwell_version. 3: slices and chunks of
parameters are whole blocks; those of an older number have cuts_blocks."""
WHOLE_BLOCKS = 3
"""The first number of a directory whose parameters are cut into whole blocks."""
EVENTS = Format(1, 1, DIRECTORY.advice)
JOURNAL = Format(1, 1, DIRECTORY.advice)
CHECKPOINT = Format(3, 1, f"{_OLDER}")
"""A checkpoint: manifest.json has the number. 1, and 2 where there are tables: 0.1.0 and 0.2.0,
whose specs differ. 3: the same under a number of its own."""
SUMS = Format(1, 1, f"{_OLDER}, or remove it")
"""The file of a MmapGradientAccumulator."""
CONTRIBUTIONS = Format(1, 1, "move it away, or give the log another name")
"""A contribution log. Lines of 0.2.0 have no number."""

WIRE = 4
"""The wire contract, protos/shardwell/v1. 1 and 2: 0.1.0 and 0.2.0, whose messages have no
number. 4: slices and chunks are whole blocks, which have exponents in fp16; `squares` of norms."""


def software_version() -> str:
    """The version of this software. The package has it, which no module inside may import."""
    return str(sys.modules["shardwell"].__version__)
