"""Files of a directory as bytes: what a kill at this instant would leave, and what it could tear.

A kill leaves mapped files as they are, and so does reading them: an image taken between two
instructions of a process is what its death there would leave.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Image = dict[str, bytes | None]
"""Contents by relative path; None is a directory."""
_WORD_BYTES = 8
"""Aligned words are written by one instruction, so no kill divides them."""


_MEMORY = Path("/dev/shm")
_MEMORY_BYTES_MIN = 512 << 20


@contextlib.contextmanager
def in_memory(otherwise: Path) -> Iterator[Path]:
    """A directory where thousands of small files wait for no disk, while the block runs."""
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _MEMORY_BYTES_MIN:
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="shardwell-") as path:
        yield Path(path)


def image_of(path: Path) -> Image:
    """All that is below `path`; taken again when a process removed some of it meanwhile."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return {
                str(entry.relative_to(path)): None if entry.is_dir() else entry.read_bytes()
                for entry in sorted(path.rglob("*"))
            }


def restore(image: Image, path: Path) -> Path:
    """Makes `path` hold that, and nothing else; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    for entry in sorted(path.rglob("*"), reverse=True):
        if str(entry.relative_to(path)) not in image:
            entry.rmdir() if entry.is_dir() else entry.unlink()
    for name, contents in image.items():
        if contents is None:
            (path / name).mkdir(exist_ok=True)
        else:
            (path / name).write_bytes(contents)
    return path


def torn(before: Image, after: Image, name: str) -> Iterator[bytes]:
    """Contents of a file when a write of several words was cut off: some are there, others not."""
    old, new = before.get(name), after[name]
    if not old or not new or len(old) != len(new):
        return
    padding = bytes(-len(old) % _WORD_BYTES)
    old_words = np.frombuffer(old + padding, np.uint64)
    new_words = np.frombuffer(new + padding, np.uint64)
    changed = np.flatnonzero(old_words != new_words)
    if changed.size < 2:
        return
    half = changed.size // 2
    for kept in (changed[:half], changed[half:], changed[::2]):
        words = old_words.copy()
        words[kept] = new_words[kept]
        yield words.tobytes()[: len(old)]
