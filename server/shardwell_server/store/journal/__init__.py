"""What was counted, in order, and the images that it starts from, which survive a loss of power."""
