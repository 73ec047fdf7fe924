"""Files of a worker's program that hide modules of Python's from all that the program imports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_NOT_HIDDEN = ("__main__", "test")
"""Names that programs give their own files, and that nothing needs from Python."""


def hidden_modules(command: Sequence[str]) -> list[Path]:
    """Files where Python looks first for `command` that have the name of a module of Python's."""
    directory = _first_directory(command)
    if directory is None:
        return []
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    return [
        entry
        for entry in entries
        if entry.stem in sys.stdlib_module_names
        and entry.stem not in (*sys.builtin_module_names, *_NOT_HIDDEN)
        and (entry.suffix == ".py" or (entry / "__init__.py").is_file())
    ]


def _first_directory(command: Sequence[str]) -> Path | None:
    if command[0].endswith(".py"):
        return Path(command[0]).resolve().parent
    if not Path(command[0]).name.startswith("python"):
        return None
    arguments = iter(command[1:])
    for argument in arguments:
        if argument in ("-m", "-c"):
            return Path.cwd()
        if argument in ("-P", "-I"):
            return None
        if argument in _WITH_VALUE:
            next(arguments, None)
        elif not argument.startswith("-"):
            return Path(argument).resolve().parent
    return None
