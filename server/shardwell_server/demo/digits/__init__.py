"""The task `digits`: a classifier of handwritten digits, one parameter, in five ways of averaging.

`samples` and `model` are the task, `worker` is the training loop as any program would write it with
the SDK, `evaluator` measures, and `run` has the settings, runs all and shows it.
"""
