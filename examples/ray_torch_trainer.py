"""PyTorch on Ray: a TorchTrainer whose workers train on shards that are Ray's actors, too.

pip install '.[torch,ray]' 'ray[train]' scikit-learn    # on all nodes
python examples/ray_torch_trainer.py /shared/digits     # a folder that all nodes reach

It asks Ray for 4 CPUs. Without a Ray cluster it starts one on this machine; where that has fewer
cores, `ray start --head --num-cpus=4` does it. Whatever is lost, a worker, a shard or a node,
Ray starts again: the workers ask `cluster.target` where the shards are now, and go on at the step
that the shards have come to, or at that of the newest checkpoint where a shard lost its memory.
"""

import os
import sys
import tempfile
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import shardwell.ray
import shardwell.torch

STEPS = 200


def train(config: dict[str, Any]) -> None:
    """What each worker does, and does again after a failure."""
    context = ray.train.get_context()
    rank, worker_count = context.get_world_rank(), context.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, test_x, y, test_y = map(torch.tensor, train_test_split(x / 16.0, y, random_state=0))
    x, test_x = x.float(), test_x.float()
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    # Longer than a shard takes to be started again where it was; one that lost its node does not
    # come back to its address, and Ray starts the workers again for that.
    with shardwell.connect(
        config["cluster"].target, worker_id=f"w{rank}", timeout_s=15.0
    ) as client:
        optimizer = shardwell.torch.ServerOptimizer(
            model, client, shardwell.AdamW(1e-2), worker_count=worker_count, name="ray-digits"
        )
        print(f"worker {rank} of {worker_count} begins at step {optimizer.next_step}", flush=True)
        for step in range(optimizer.next_step, config["steps"]):
            seed = torch.Generator().manual_seed(step * worker_count + rank)  # that step's batch
            batch = torch.randint(0, len(x), (64,), generator=seed)
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()  # averages over the workers, updates on the shards, takes the weights
            optimizer.zero_grad()
            if rank == 0 and step % 20 == 19:
                client.save_checkpoint(config["checkpoint"], ["ray-digits"], keep=2)
    accuracy = (model(test_x).argmax(dim=1) == test_y).double().mean().item()
    with tempfile.TemporaryDirectory() as folder:
        made = None
        if rank == 0:  # the last one has the weights of the last step
            shardwell.export_checkpoint(config["checkpoint"], f"{folder}/model.safetensors")
            made = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"accuracy": accuracy}, checkpoint=made)


def main(folder: str) -> None:
    checkpoint = os.path.join(folder, "checkpoints", "{step}")
    # Ray itself lets in all that reach its ports, so its network is private: insecure=True. Else
    # tls= and tokens=, as docs/ray.md says.
    with shardwell.ray.start_shards(2, checkpoint=checkpoint, insecure=True) as cluster:
        result = TorchTrainer(
            train,
            train_loop_config={"cluster": cluster, "checkpoint": checkpoint, "steps": STEPS},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=os.path.join(folder, "ray"),
                failure_config=ray.train.FailureConfig(max_failures=5),
            ),
        ).fit()
    print(f"model.safetensors in {result.checkpoint.path}")
    print(f"accuracy {result.metrics['accuracy']:.3f} on digits that were not seen")


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
