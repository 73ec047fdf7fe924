"""What storage keeps of rare changes of a parameter or table."""

from __future__ import annotations

from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
"""A rare change as a JSON object: shard/register.py and table_register.py have its kinds."""
