"""Workers among themselves: where they meet, how they agree, and how they reduce."""
