"""The demo: a real cluster that trains a classifier of handwritten digits.

`digits` and `model` are the task, `worker` is the training loop as any program would write it with
the SDK, `crew` and `examiner` watch it, `run` puts them together, `screen` shows it.
"""
