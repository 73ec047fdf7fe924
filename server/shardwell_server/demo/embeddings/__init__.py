"""The task `embeddings`: a knowledge graph's entities and relations as rows of two tables.

`knowledge_graph`, `batches`, `complex_model` and `ranking` are the task, in NumPy alone; `worker`
is the training loop as any program would write it with the SDK. It runs twice, on a cluster with
several workers and in one process with `local_table`, and `run` compares what they have learnt;
`examiner` measures, `screen` shows.
"""
