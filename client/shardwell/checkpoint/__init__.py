"""Checkpoints and exports: their files, and how they are saved and restored."""
