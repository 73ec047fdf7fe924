"""An example: a knowledge graph's entities and relations as rows of two tables.

python -m embeddings run        # in examples/; needs: pip install --no-deps pykeen==1.11.1

`knowledge_graph`, `batches`, `complex_model` and `ranking` are the task, in NumPy alone; `worker`
is the training loop as any program would write it with the SDK. It runs twice, on a cluster with
several workers and in one process with `local_table`, and `run` compares what they have learnt;
`evaluator` measures, `display` shows.
"""
