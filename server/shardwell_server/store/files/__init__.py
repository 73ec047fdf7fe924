"""Files and directories that the kinds of stores are made of."""
