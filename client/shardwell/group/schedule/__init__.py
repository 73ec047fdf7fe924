"""Who sends what to whom in a collective call: pure plans and their arithmetic."""
