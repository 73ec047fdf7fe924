"""The agreement of ranks on which call comes next, and on whether it can be made."""
