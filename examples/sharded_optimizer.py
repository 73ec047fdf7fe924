"""A sharded optimizer by hand, as in ZeRO: each rank has the optimizer state of its own segment.

pip install scikit-learn
shardwell run -n 2 -- python examples/sharded_optimizer.py
"""

import numpy as np
from sklearn.datasets import load_digits

import shardwell

STEP_COUNT, BATCH_SIZE, LEARNING_RATE, MOMENTUM = 200, 128, 0.5, 0.9

digits = load_digits()
inputs = np.column_stack([digits.data / 16, np.ones(len(digits.data))]).astype(np.float32)
order = np.random.default_rng(0).permutation(len(inputs))
training, held_out = order[450:], order[:450]


def gradient_of(weights, samples):
    """Of the mean cross-entropy of a softmax regression: (65, 10), as the weights are."""
    scores = inputs[samples] @ weights
    by_scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    by_scores /= by_scores.sum(axis=1, keepdims=True)
    by_scores[np.arange(len(samples)), digits.target[samples]] -= 1
    return inputs[samples].T @ by_scores / len(samples)


with shardwell.join_group() as group:
    weights = np.zeros((65, 10), np.float32)  # on every rank
    own = group.segment(weights)  # a view of this rank's part of them
    master = own.copy()  # never rounded to fp16, in which weights and gradients travel
    momentum = np.zeros_like(master)  # state of this part alone: 1/n of the memory, of the work

    for step in range(STEP_COUNT):
        batch = np.random.default_rng(step).choice(training, BATCH_SIZE, replace=False)
        share = batch[group.rank :: group.size]
        gradient = gradient_of(weights, share)
        mean = group.reduce_scatter(gradient, op="mean", sample_count=len(share))  # this part's
        momentum = MOMENTUM * momentum + mean
        master -= LEARNING_RATE * (1 - MOMENTUM) * momentum
        own[:] = master
        group.all_gather(weights)

    accuracy = ((inputs[held_out] @ weights).argmax(axis=1) == digits.target[held_out]).mean()
    print(f"{momentum.size} of {weights.size} momenta here; accuracy {accuracy:.4f}")
