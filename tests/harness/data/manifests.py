"""Manifests of checkpoints, changed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastcrc import crc32

MANIFEST = "manifest.json"


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest, and makes its CRC fit."""
    fields = json.loads((path / MANIFEST).read_text())
    change(fields)
    fields["crc32c"] = "00000000"
    text = json.dumps(fields, indent=2)
    crc = f'"crc32c": "{crc32.iscsi(text.encode()):08x}"'
    (path / MANIFEST).write_text(text.replace('"crc32c": "00000000"', crc, 1))
