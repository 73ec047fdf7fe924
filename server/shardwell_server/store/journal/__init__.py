"""The journal of counted contributions, and the images it starts from, on disk."""
