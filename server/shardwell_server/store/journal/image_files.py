"""Images of a parameter or table on disk: which are there, and which are superfluous.

image-000003/        one that stands
image-000005.new/    one under way, or cut off
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from shardwell_server.store.files.mapped import storage_error, sync_directory
from shardwell_server.store.journal.journal import forget_segment_begun, segments

_PREFIX = "image-"
IMAGE_AT_BYTES_MIN = 64 << 20
"""A journal smaller than that is not worth an image, however small what it is of."""


def image_path(directory: Path, number: int) -> Path:
    """Where the image of a number stands."""
    return directory / f"{_PREFIX}{number:06d}"


def images(directory: Path) -> dict[int, Path]:
    """The images that stand, by number, in order."""
    found = {
        int(path.name.removeprefix(_PREFIX)): path
        for path in directory.glob(f"{_PREFIX}*")
        if path.suffix != ".new"
    }
    return dict(sorted(found.items()))


def forget_images(
    directory: Path, reached: Callable[[str], None], before: int | None = None
) -> None:
    """Removes images and journal segments of lower numbers; None: all.

    Raises:
        StorageError: they can't be removed.
    """
    try:
        older = [p for n, p in images(directory).items() if before is None or n < before]
        for path in older:
            path.rename(path.with_suffix(".new"))  # a part of one is no image
            reached("image forgotten")
        if older:
            sync_directory(directory)  # a segment is needed for as long as its image is there
        for number, path in segments(directory).items():
            if before is None or number < before:
                path.unlink()
                reached("segment forgotten")
        for path in directory.glob(f"{_PREFIX}*.new"):
            shutil.rmtree(path)
        if before is None:
            forget_segment_begun(directory)
    except OSError as error:
        raise storage_error(directory, error, "removing what is superfluous") from None
