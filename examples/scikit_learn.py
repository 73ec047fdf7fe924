"""scikit-learn on a cluster: two processes train one linear classifier of handwritten digits.

shardwell cluster --shard-count 2     # prints: export SHARDWELL_SHARDS=...
python examples/scikit_learn.py w0 &  # with that variable set
python examples/scikit_learn.py w1

Each has half of the digits. After each pass over them all go on with the mean of their models,
which is what the optimizer `Average` makes: weights that are pushed come back averaged.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split

import shardwell

WORKERS = ("w0", "w1")
PASSES = 10

rank = WORKERS.index(sys.argv[1])
inputs, targets = load_digits(return_X_y=True)
classes = np.unique(targets)
train_inputs, test_inputs, train_targets, test_targets = train_test_split(
    inputs / 16.0, targets, test_size=0.25, random_state=0
)
own_inputs, own_targets = train_inputs[rank :: len(WORKERS)], train_targets[rank :: len(WORKERS)]

model = SGDClassifier(random_state=rank)
with shardwell.connect(worker_id=sys.argv[1]) as client:
    mean = client.parameter(
        "scikit-learn-digits",
        tensors={"coef": (len(classes), inputs.shape[1]), "intercept": (len(classes),)},
        optimizer=shardwell.Average(),
        worker_count=len(WORKERS),
        codec="fp32",
    )
    for _ in range(PASSES):
        model.partial_fit(own_inputs, own_targets, classes=classes)
        averaged = mean.exchange(
            {"coef": model.coef_, "intercept": model.intercept_}, sample_count=len(own_inputs)
        )
        model.coef_[:], model.intercept_[:] = averaged["coef"], averaged["intercept"]
print(f"accuracy {model.score(test_inputs, test_targets):.3f} on held-out digits")  # above 0.9
