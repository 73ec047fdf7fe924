"""Messages between the members of a group."""
