"""How ranks agree on which call comes next, and on whether it can be made."""
