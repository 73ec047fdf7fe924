"""Keras 3 on a cluster: two processes train a classifier of scikit-learn's handwritten digits.

shardwell cluster --shard-count 2     # prints: export SHARDWELL_SHARDS=...
python examples/keras_digits.py w0 &  # with that variable set
python examples/keras_digits.py w1

With JAX, or with PyTorch: KERAS_BACKEND=torch. It needs keras and scikit-learn beside one of them.
`ServerOptimizer` is all that another program has to copy: `model.fit` stays as it is.
"""

import os
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import shardwell

WORKERS = ("w0", "w1")


class ServerOptimizer(keras.optimizers.Optimizer):
    """Keras's end of an optimizer that runs on the shards: gradients leave, weights come back.

    Args:
        model: Built; it gets the first worker's weights, or those that the cluster has already.
        client: Made by `shardwell.connect`.
        rule: The update rule on the shards, which has the learning rate and the weight decay.
        worker_count: Workers that make a step; each has as many batches as the others.
    """

    def __init__(
        self,
        model: keras.Model,
        client: shardwell.Client,
        rule: shardwell.Optimizer,
        worker_count: int,
    ) -> None:
        super().__init__(learning_rate=0.0)
        self.build(model.trainable_variables)
        values = {v.path: keras.ops.convert_to_numpy(v.value) for v in model.trainable_variables}
        options: dict[str, Any] = {"optimizer": rule, "worker_count": worker_count}
        self._net: Any
        if keras.backend.backend() == "jax":  # which compiles what calls `apply`
            import shardwell.jax

            self._net = shardwell.jax.TreeParameter(client, model.name, values, **options)
        else:
            self._net = client.parameter(model.name, tensors=values, **options)
            self._net.init(values)
        next_step = getattr(self._net, "parameter", self._net).next_step
        self._take(self._net.get_weights(min_version=next_step), model.trainable_variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Ends a step: averages gradients over the workers, updates, takes the weights."""
        variables = list(trainable_variables or self._trainable_variables)
        gradient = {v.path: each for v, each in zip(variables, grads, strict=True)}
        self._take(self._net.exchange(gradient), variables)
        self.iterations.assign_add(1)

    def _take(self, weights: Any, variables: Any) -> None:
        for variable in variables:
            variable.assign(weights[variable.path])


def main(worker_id: str) -> None:
    keras.utils.set_random_seed(WORKERS.index(worker_id))
    inputs, targets = load_digits(return_X_y=True)
    split = train_test_split(inputs / 16.0, targets, test_size=0.25, random_state=0)
    train_inputs, test_inputs, train_targets, test_targets = split
    own = slice(WORKERS.index(worker_id), len(train_inputs) // 2 * 2, len(WORKERS))
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ],
        name="keras-digits",
    )
    with shardwell.connect(worker_id=worker_id) as client:
        model.compile(
            optimizer=ServerOptimizer(model, client, shardwell.AdamW(3e-3), len(WORKERS)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.fit(train_inputs[own], train_targets[own], batch_size=32, epochs=10, verbose=0)
    _, accuracy = model.evaluate(test_inputs, test_targets, verbose=0)
    print(f"accuracy {accuracy:.3f} on held-out digits")  # above 0.95


main(sys.argv[1])
