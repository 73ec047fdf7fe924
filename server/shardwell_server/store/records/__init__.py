"""Small records that are one or the other after a kill, never a mixture."""
