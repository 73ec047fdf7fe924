"""The plans of a collective call: senders, receivers and their arithmetic. Pure."""
