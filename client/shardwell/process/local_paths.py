"""Paths that users give: of this machine's files, never of a store's behind a URL."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardwell.errors import ArgumentError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""As a Path has it, too, which keeps one slash of two."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path of this machine, where `~` is the user's home; ArgumentError: it is a URL."""
    given = os.fspath(path)
    found = _URL.match(given)
    if found is not None:
        scheme = found[1].lower()
        own = re.sub(r"^[^:]*:/+", "/", given)
        advice = (
            f"give {own!r}"
            if scheme == "file"
            else "give a local path, and copy the files with the tools of that store, or mount "
            "the store as a directory"
        )
        raise ArgumentError(
            f"{given!r} is a URL of {scheme!r}; expected a local path: {advice}; for a local "
            f"directory of that name write {os.path.abspath(given)!r}"
        )
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ArgumentError(
            f"{given!r} has no home directory: {error}; write the path without ~, or for a file of "
            f"that name {os.path.abspath(given)!r}"
        ) from None
