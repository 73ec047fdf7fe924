"""Parts of outer.py."""
