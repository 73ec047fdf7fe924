"""Who may do what: tokens and their rights, and the log of who did."""
