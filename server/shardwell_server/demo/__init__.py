"""The demo: a real cluster and real workers that learn from real data, on a screen.

What they learn is a task of its own, a package here. What tasks have in common is `crew`, the
workers' processes, with what they tell (`reports`) and where they stand (`standing`), `shards` that
end too early, the line that shows it all go on (`progress`), and how it is stopped (`stop`).
"""
