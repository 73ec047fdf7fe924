"""What storage keeps of rare changes of a parameter or table."""

from __future__ import annotations

from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
"""A rare change as a JSON object; shard/parameter/register.py and its sibling have the kinds."""
