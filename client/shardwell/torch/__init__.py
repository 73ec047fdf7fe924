"""Shardwell for PyTorch; needs the extra `torch`.

model, optimizer, loader = shardwell.torch.prepare(model, optimizer, loader)
for epoch in loader.epochs(3):
    for inputs, targets in loader:
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

Once it is imported, `torch.distributed.init_process_group("shardwell")` finds its backend.
"""

from shardwell.process.installing import install_command

try:
    import torch.distributed as _distributed
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        f"shardwell.torch needs PyTorch; run: {install_command('torch>=2.1')}, on Linux without a "
        "GPU with --index-url https://download.pytorch.org/whl/cpu",
        name="torch",
    ) from None

from shardwell.torch.collectives import all_reduce_hook, broadcast_state
from shardwell.torch.diloco import DiLoCo
from shardwell.torch.embedding import Embedding, EmbeddingBag
from shardwell.torch.loop.mean_gradients import MeanGradients, mean_gradients
from shardwell.torch.loop.prepare import prepare
from shardwell.torch.loop.shares import SharedLoader
from shardwell.torch.optimizer import ServerOptimizer

__all__ = [
    "DiLoCo",
    "Embedding",
    "EmbeddingBag",
    "MeanGradients",
    "ServerOptimizer",
    "SharedLoader",
    "all_reduce_hook",
    "broadcast_state",
    "mean_gradients",
    "prepare",
]

if _distributed.is_available():  # some builds of torch are without
    from shardwell.torch.process_group import register

    register()
