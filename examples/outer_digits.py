"""Outer training (DiLoCo) with PyTorch: learners of handwritten digits that send once in 25 steps.

shardwell cluster --shard-count 2     # prints: export SHARDWELL_SHARDS=...
export OMP_NUM_THREADS=1              # learners of one machine share its cores
python examples/outer_digits.py w0 &  # with that variable set; w1, w2 beside it, at any time
python examples/outer_digits.py w1

It needs PyTorch and scikit-learn. A learner that is killed costs the others a second; started
again, it goes on with the cluster's weights. Each ends when all fragments have 12 outer steps.
"""

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import shardwell
import shardwell.torch

digits = load_digits()
parts = train_test_split(digits.data / 16, digits.target, test_size=450, random_state=0)
inputs, held_out = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
targets, held_out_targets = (torch.tensor(part) for part in parts[2:])

torch.manual_seed(sum(sys.argv[1].encode()))  # each learner draws batches of its own
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
with (
    shardwell.connect(worker_id=sys.argv[1]) as client,
    shardwell.torch.DiLoCo(
        model,
        optimizer,
        client,
        name="outer-digits",
        outer=shardwell.SGD(
            0.7, momentum=0.5, nesterov=True
        ),  # little momentum for few outer steps
        sync_every=50,  # inner steps; every 25 one of two fragments is due
        fragments=2,
        overlap=2,  # and leaves two steps before
        members=shardwell.Elastic(min_count=1, max_count=64),
        samples_per_step=32,
    ) as training,
):
    while training.next_step < 12:
        batch = torch.randint(0, len(inputs), (32,))
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    training.reload()  # what all learners share, without the steps since the last take
    times = f"waited {training.outer.waited_s:.2f} s, hid {training.outer.hidden_s:.2f} s"
    print(f"{training.inner_step} inner steps; {times}")
    accuracy = (model(held_out).argmax(dim=1) == held_out_targets).float().mean()
    print(f"accuracy {accuracy:.3f} on held-out digits")
