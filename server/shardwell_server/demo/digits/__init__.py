"""The task `digits`: a classifier of handwritten digits, one parameter, in five ways of averaging.

`samples` and `model` are the task, `config` says what is run of it, `worker` is the training loop
as any program would write it with the SDK, `evaluator` measures, `run` puts them together, and
`display` shows it.
"""
