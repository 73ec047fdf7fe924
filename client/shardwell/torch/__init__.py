"""Shardwell for PyTorch; needs the extra `torch`.

model, optimizer, loader = shardwell.torch.prepare(model, optimizer, loader)
for epoch in loader.epochs(3):
    for inputs, targets in loader:
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

Once it is imported, `torch.distributed.init_process_group("shardwell")` finds its backend.
"""

import importlib
import typing

from shardwell.process.environment import install_command

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
from shardwell.torch.loop.prepare import Prepared, prepare
from shardwell.torch.loop.shares import SharedLoader
from shardwell.torch.optimizer import ServerOptimizer

if typing.TYPE_CHECKING:
    from shardwell.torch.loop.lightning_callback import LightningCallback
    from shardwell.torch.loop.trainer_callback import TrainerCallback

_LATER = {"LightningCallback": "lightning_callback", "TrainerCallback": "trainer_callback"}
"""The modules that import a framework, each with the class whose first use imports it."""

__all__ = [
    "DiLoCo",
    "Embedding",
    "EmbeddingBag",
    "LightningCallback",
    "MeanGradients",
    "Prepared",
    "ServerOptimizer",
    "SharedLoader",
    "TrainerCallback",
    "all_reduce_hook",
    "broadcast_state",
    "mean_gradients",
    "prepare",
]

if _distributed.is_available():  # some builds of torch are without
    from shardwell.torch.process_group import register

    register()


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.loop.{_LATER[name]}"), name)
