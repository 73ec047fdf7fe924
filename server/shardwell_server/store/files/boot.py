"""The mark of files' last process: as it left them, or the machine lost power since.

The kernel keeps what a killed process wrote; what it had not yet written to disk goes with the
machine. So `boot.json` holds which start of the machine wrote last, and whether all was synced.
"""

from __future__ import annotations

import json
from pathlib import Path

from shardwell_server.store.files.mapped import failing, replace_file

_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class Boot:
    """The mark of one directory; `boot_id` is by default the kernel's, None where it tells none."""

    def __init__(self, path: Path, boot_id: str | None = None) -> None:
        self._path = path / "boot.json"
        self._boot_id = boot_id or kernel_boot_id()

    def is_torn(self) -> bool:
        """True if files may lack writes, or have some without earlier ones."""
        try:
            found = json.loads(self._path.read_text())
            state, boot_id = found["state"], found["boot_id"]
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            return True  # it was cut off by what it is to tell of
        if state == "clean":
            return False
        return state != "running" or boot_id is None or boot_id != self._boot_id

    def mark(self, state: str) -> None:
        """Notes a state: "recovering" from torn files, "running", or "clean": all is synced."""
        with failing(self._path, "writing it"):
            replace_file(self._path, json.dumps({"boot_id": self._boot_id, "state": state}))


def kernel_boot_id() -> str | None:
    """Returns this start's id of the machine; None where the kernel has none."""
    try:
        return _BOOT_ID_PATH.read_text().strip()
    except OSError:
        return None
