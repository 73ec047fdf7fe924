"""What lies at a path, to compare before and after: names, contents of files, targets of links."""

from __future__ import annotations

import os
from pathlib import Path


def contents_of(path: Path) -> dict[str, bytes | str | None]:
    """Everything at and below a path: the contents of files, where links lead; None: directories.

    Links are not followed, except at the path itself.
    """
    found: dict[str, bytes | str | None] = {"": os.readlink(path) if path.is_symlink() else None}
    if path.is_file():
        return found | {"file": path.read_bytes()}
    for entry in sorted(path.rglob("*")):
        name = str(entry.relative_to(path))
        if entry.is_symlink():
            found[name] = os.readlink(entry)
        else:
            found[name] = entry.read_bytes() if entry.is_file() else None
    return found
