"""The demo: a real cluster and real workers that learn from real data, on a screen.

What they learn is a task of its own, a package here. What tasks have in common: the workers'
processes (`workers`), what they report (`reports`), how far they are and the line that shows it
(`progress`), and shards that end too early (`cluster`).
"""
