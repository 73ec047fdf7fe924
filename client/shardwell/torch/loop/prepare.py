"""A plain PyTorch program's model, optimizer and loader, made to train on a cluster."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from typing import Any, TypeVar

import torch

from shardwell.client import WORKER_ID_VARIABLE, Client, connect
from shardwell.errors import ArgumentError
from shardwell.group.launch.launchers import known_launcher
from shardwell.numerics.arguments import check_integer
from shardwell.process.environment import variable
from shardwell.rpc.session import unique_worker_id
from shardwell.specs.members import Elastic
from shardwell.torch.loop.rules import shards_rule
from shardwell.torch.loop.shares import Share, SharedLoader
from shardwell.torch.optimizer import ServerOptimizer

_ACCUMULATED_MAX = 2**20
ModelT = TypeVar("ModelT", bound=torch.nn.Module)


def prepare(
    model: ModelT,
    optimizer: torch.optim.Optimizer,
    loader: Any = None,
    *,
    client: Client | None = None,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    **options: Any,
) -> tuple[ModelT, ServerOptimizer, Any]:
    """Makes a plain training loop one worker's of several: model, optimizer and loader of it.

        model, optimizer, loader = shardwell.torch.prepare(model, optimizer, loader)
        for epoch in loader.epochs(3):
            for inputs, targets in loader:
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

    Start as many workers as you like with `shardwell run -n 2 -- python train.py`, torchrun, srun
    or mpirun. One that is killed and started again goes on at the cluster's step, with its weights,
    optimizer state and batches. Rank 0 (`optimizer.client.rank`) saves and evaluates.

    Args:
        model: See `ServerOptimizer`; it is returned as it is.
        optimizer: An optimizer of torch that has made no step yet: SGD, Adam, AdamW, Adagrad or
            RMSprop, which the shards run with the same hyperparameters. Schedulers may be made of
            it, or of the one that is returned. A ServerOptimizer is taken as it is.
        loader: A plain DataLoader. The one that is returned deals each epoch among the workers, as
            torch's DistributedSampler does: batches keep their size, and an epoch has fewer. It
            shuffles anew each epoch, without set_epoch. With `members`, each worker goes through
            all data in an order of its own, and an epoch ends with the cluster's step: all of its
            batches, divided by the members' `reference_count`. Default: none, and None is returned.
        client: Made by `shardwell.connect`, and the caller's to close. Default: a client of
            $SHARDWELL_SHARDS that the end of the program closes. Its worker id is
            $SHARDWELL_WORKER_ID, or made of `name` and rank, or a new one with `members`.
        gradient_accumulation_steps: Backward passes before each `step`, for the place in the data
            at which a worker goes on that is started again.
        seed: Of shuffling, the same on all workers; it is added to that of the loader's generator.
        options: As of `ServerOptimizer`: worker_count (default: as many as the launcher has
            started, else 1), members, name, codec and others.

    Returns:
        The model, a `ServerOptimizer`, and a `SharedLoader`.

    Raises:
        ArgumentError: the optimizer, the loader or an option can't be; says what to do.
        ShardwellError: as `connect` and `ServerOptimizer`.
    """
    batches_per_step = check_integer(
        "gradient_accumulation_steps", gradient_accumulation_steps, 1, _ACCUMULATED_MAX
    )
    check_integer("seed", seed, 0, 2**32 - 1)
    if isinstance(optimizer, ServerOptimizer):
        if options or client is not None:
            raise ArgumentError(
                "prepare() takes a ServerOptimizer as it is, with its client and options; got "
                f"{', '.join([*options, *(['client'] if client is not None else [])])}"
            )
        prepared = optimizer
    else:
        prepared = _on_shards(model, optimizer, client, options)
    if loader is None:
        return model, prepared, None
    if isinstance(loader, SharedLoader):  # a cell of a notebook was run again
        loader = loader.whole
    return model, prepared, SharedLoader(loader, _share(prepared, batches_per_step, seed))


def _on_shards(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    client: Client | None,
    options: dict[str, Any],
) -> ServerOptimizer:
    """A ServerOptimizer in place of one of torch's.

    Raises:
        ArgumentError: the shards can't run it, or it has made steps already.
        ShardwellError: see `prepare`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            "optimizer must be an optimizer of torch, such as "
            f"torch.optim.AdamW(model.parameters()); got {type(optimizer).__name__}"
        )
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise ArgumentError(
            f"this {type(optimizer).__name__} has made steps, or has loaded a state, which the "
            "shards do not have; pass one that is new: a training that goes on has its state on "
            "the cluster, and client.restore_checkpoint() brings back that of a checkpoint"
        )
    found = shards_rule(optimizer)
    if isinstance(found, str):
        raise ArgumentError(f"{found}; pass torch.optim.SGD, Adam, AdamW, Adagrad or RMSprop")
    crew = _crew(options)
    prepared = ServerOptimizer(
        model,
        client or _connected(str(options.get("name", "model")), crew),
        found.rule,
        param_groups=found.param_groups,
        **{**options, "worker_count": crew},
    )
    _hand_over(optimizer, prepared)
    return prepared


def _crew(options: dict[str, Any]) -> int | None:
    """How many workers make a step; None: they come and go, or nobody waits for another.

    Raises:
        ArgumentError: the launcher has started another number.
    """
    given = options.get("worker_count")
    if options.get("members") is not None or options.get("mode") == "async":
        return given  # ServerOptimizer refuses both
    launcher = known_launcher(os.environ)
    if launcher is None:
        return 1 if given is None else given
    if given not in (None, launcher.size):
        raise ArgumentError(
            f"worker_count={given!r}, and {launcher.source} has started {launcher.size} workers; "
            "leave worker_count out, or start as many"
        )
    return launcher.size


def _connected(name: str, crew: int | None) -> Client:
    """A client for the rest of the program.

    Raises:
        ArgumentError: a worker that is started again would be another one.
        ShardwellError: as `connect`.
    """
    worker_id = variable(WORKER_ID_VARIABLE)
    if not worker_id:
        launcher = known_launcher(os.environ)
        if crew is None:
            worker_id = _own_id()
        elif launcher is not None or crew == 1:
            worker_id = f"{name}-{launcher.rank if launcher is not None else 0}"
        else:
            raise ArgumentError(
                f"worker_count={crew}, and no launcher has started this worker, so nothing says "
                f"which of them it is; start all with `shardwell run -n {crew} -- python ...` or "
                f"torchrun, or set ${WORKER_ID_VARIABLE} to a name of its own, the same after a "
                "restart, or pass client="
            )
    client = connect(worker_id=worker_id)
    atexit.register(_end, weakref.ref(client))
    return client


@functools.cache
def _own_id() -> str:
    """The same in all of this process, so that a cell of a notebook may be run again."""
    return unique_worker_id()


def _end(client: weakref.ref[Client]) -> None:
    """Closes a client at the end of the program, as its `with` block would."""
    ended = client()
    if ended is not None:
        error = getattr(sys, "last_value", None)  # which has ended the program
        ended.__exit__(type(error) if error is not None else None, error, None)


def _hand_over(optimizer: torch.optim.Optimizer, prepared: ServerOptimizer) -> None:
    """Lets schedulers of the optimizer set the rates of the one that steps, and nothing else."""
    optimizer.param_groups = prepared.param_groups
    optimizer.__dict__["_opt_called"] = True  # schedulers warn of one that makes no steps

    def refuse(*_: Any) -> None:
        raise ArgumentError(
            f"this {type(optimizer).__name__} was given to prepare(), whose optimizer makes the "
            "steps: model, optimizer, loader = shardwell.torch.prepare(model, optimizer, loader)"
        )

    optimizer.register_step_pre_hook(refuse)


def _share(optimizer: ServerOptimizer, batches_per_step: int, seed: int) -> Share:
    """This worker's part of the data."""
    spec, client = optimizer.parameter.spec, optimizer.client
    elastic: Elastic | None = spec.members
    by_id = elastic is not None or spec.mode == "async"
    return Share(
        lambda: optimizer.next_step,
        rank=0 if by_id else client.rank,
        worker_count=(elastic.reference_count or 1 if elastic else 1)
        if by_id
        else client.worker_count,
        worker_id=client.worker_id if by_id else "",
        batches_per_step=batches_per_step,
        seed=seed,
    )
