"""A plain PyTorch program's model, optimizer and loader, made to train on a cluster."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from shardwell.checkpoint.format import Checkpoint
from shardwell.checkpoint.steps import inspect_checkpoint, is_there
from shardwell.client import WORKER_ID_VARIABLE, Client, connect
from shardwell.errors import ArgumentError, WorkersMissingError
from shardwell.group.launch import known_launcher
from shardwell.numerics.arguments import check_integer
from shardwell.parameter.parameter import Parameter
from shardwell.process.environment import variable
from shardwell.rpc.cluster_status import all_rows
from shardwell.rpc.session import unique_worker_id
from shardwell.specs.checks import check_number
from shardwell.specs.samples import Samples
from shardwell.torch.loop.kept_objects import TensorForm, attached, objects_of
from shardwell.torch.loop.mean_gradients import MeanGradients, mean_gradients
from shardwell.torch.loop.rules import shards_rule
from shardwell.torch.loop.shares import (
    OwnDeals,
    SharedBatches,
    SharedLoader,
    batch_count,
    samples_of,
)
from shardwell.torch.mistakes import check_model, described
from shardwell.torch.optimizer import ServerOptimizer, save_training
from shardwell.torch.untrained import hand_over_model
from shardwell.training.leave_request import EXIT_CODE

_LOG = logging.getLogger("shardwell")
_CALL = "model, optimizer, loader = shardwell.torch.prepare(model, optimizer, loader)"
_ACCUMULATED_MAX = 2**20
_NAME = "model"
_RESUME_PAUSE_S = 0.2
_OF_MEANS = frozenset({"name", "worker_count", "codec", "clip_norm", "timeout_s"})
"""Options that an optimizer on the workers has a use for."""


ModelT = TypeVar("ModelT", bound=torch.nn.Module)


def prepare(
    model: ModelT,
    optimizer: torch.optim.Optimizer,
    loader: Any = None,
    *,
    client: Client | None = None,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    schedule: Any = None,
    scaler: Any = None,
    state: Mapping[str, Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Prepared[ModelT]:
    """Makes a plain training loop one worker's of several: model, optimizer and loader of it.

        model, optimizer, loader = shardwell.torch.prepare(model, optimizer, loader)
        for epoch in loader.epochs(3):
            for inputs, targets in loader:
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

    Start as many workers as you like with `shardwell run -n 2 -- python train.py`, torchrun, srun
    or mpirun. One that is killed and started again goes on at the cluster's step, with its weights,
    optimizer state and batches, and with what `schedule`, `scaler` and `state` are: as if nothing
    had happened. Rank 0 (`optimizer.client.rank`) saves, with `Prepared.save`, and evaluates.

    Args:
        model: See `ServerOptimizer`; it is returned as it is.
        optimizer: An optimizer of torch that has made no step yet. The shards run SGD, Adam, AdamW,
            Adagrad and RMSprop with the same hyperparameters. Any other stays on the workers, and
            steps with `mean_gradients`: a worker that is killed ends that training, which goes on
            from a checkpoint of yours; a log line says so, and why. Schedulers may be made of it,
            or of the one that is returned. A ServerOptimizer is taken as it is.
        loader: A plain DataLoader. Of the one that is returned each sample counts once an epoch, on
            all workers: the shards deal its batches, and a sample has counted as the gradient has
            that it is in. Batches keep their size, so each worker has fewer of them. It shuffles
            anew each epoch, without set_epoch. What a lost worker had is dealt again, and another
            batch size or crew goes on with the rest. In asynchronous mode, of which no account is
            kept, each worker goes through all data in an order of its own. Default: none, and None
            is returned.
        client: Made by `shardwell.connect`, and the caller's to close. Default: a client of
            $SHARDWELL_SHARDS that the end of the program closes. Its worker id is
            $SHARDWELL_WORKER_ID, or made of `name` and rank, or a new one with `members`.
        gradient_accumulation_steps: Backward passes before each `step`; in asynchronous mode a
            worker that is started again finds its place in the data by it. Others need none.
        seed: Seed of shuffling, the same on all workers; it is added to that of the loader's
            generator.
        schedule: A scheduler of torch's, or a list of them, made of the optimizer. The shards keep
            its state with each step, and so they do of the statistics of BatchNorm, and all that
            the next two have: a worker that is started again, and one that goes on from a
            checkpoint, has those of its step; one that comes anew has another one's. See
            `Parameter.keep_state`. A loop steps it behind the optimizer, as ever. In asynchronous
            mode, and where the optimizer stays on the workers, these three are refused: leave a
            schedule out there, and it works as ever.
        scaler: A `torch.amp.GradScaler`.
        state: More objects by name, with `state_dict()` and `load_state_dict()`, dicts, or
            generators: a moving average of the weights, `torch.default_generator`, a counter. All
            of it has 64,000,000 bytes at most.
        resume: A checkpoint that `Prepared.save`, a callback or the keeper has made, with `{step}`
            the newest: rank 0 restores it, with what is beside it, into a cluster that has not this
            training, and all go on there. Where there is none yet, the training begins. Refused
            where the optimizer stays on the workers.
        options: Options of `ServerOptimizer`: worker_count (default: as many as the launcher has
            started, else 1), members, name, codec and others. And `clip_norm`: the mean gradient of
            all workers is scaled down to this norm, by the shards or, where the optimizer stays
            there, on each worker; take it in place of clip_grad_norm_, which clips a worker's own.

    Returns:
        `Prepared`, a tuple: the model, a `ServerOptimizer` (or the optimizer that was given, where
        it stays on the workers), and a `SharedLoader`. `optimizer.client` is the client.

    Raises:
        ArgumentError: the optimizer, the loader or an option can't be; says what to do.
        ShardwellError: as `connect` and `ServerOptimizer`.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        >>> data = torch.utils.data.TensorDataset(torch.ones(8, 3))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
        >>> model, optimizer, loader = shardwell.torch.prepare(
        ...     model, plain, loader, client=client, name="prepared"
        ... )
        >>> for epoch in loader.epochs(2):
        ...     for (inputs,) in loader:
        ...         model(inputs).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> optimizer.next_step
        4
        >>> optimizer.close()
    """
    batches_per_step = check_integer(
        "gradient_accumulation_steps", gradient_accumulation_steps, 1, _ACCUMULATED_MAX
    )
    check_integer("seed", seed, 0, 2**32 - 1)
    check_model(model, _CALL)
    if isinstance(loader, SharedLoader):  # a cell of a notebook was run again
        loader = loader.whole
    samples = None
    if loader is not None:
        samples = samples_of(loader, seed)  # before anything is made on the cluster
    asked = {"schedule": schedule, "scaler": scaler, "state": state}
    given = optimizer.parameter.spec.mode if isinstance(optimizer, ServerOptimizer) else None
    if (given or options.get("mode")) == "async":
        _refuse(
            asked,
            "with mode='async' workers make steps of their own, so shards keep no state of one; "
            "leave it out, as the object works without, and save it with the program, or train "
            "with mode='sync'",
        )
    if isinstance(optimizer, ServerOptimizer):
        if options or client is not None:
            raise ArgumentError(
                "prepare() takes a ServerOptimizer as it is, with its client and options; got "
                f"{', '.join([*options, *(['client'] if client is not None else [])])}"
            )
        prepared: Any = optimizer
        stepper: ServerOptimizer | MeanGradients = optimizer
        if resume is not None:
            raise ArgumentError(
                "resume= restores before the ServerOptimizer is made; give prepare() an optimizer "
                "of torch, or call client.restore_checkpoint() before"
            )
    else:
        prepared, stepper = _prepared(model, optimizer, client, options, asked, resume)
    batches = None if samples is None else _batches(stepper, samples, batches_per_step)
    if isinstance(stepper, ServerOptimizer):
        schedules = attached(schedule, optimizer, prepared)
        kept = objects_of(model, [prepared], schedules, scaler, {} if state is None else state)
        _keep(stepper, kept, batches)
    shared = None if batches is None else SharedLoader(loader, batches)
    return Prepared(model, prepared, shared)


class Prepared(NamedTuple, Generic[ModelT]):
    """A model, its optimizer and its loader, as `prepare` returns them.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> plain = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> training = shardwell.torch.prepare(model, plain, client=client, name="to_save")
        >>> checkpoint = training.save("runs/{step}", keep=3)
        >>> "to_save" in {each.name for each in checkpoint.parameters}
        True
        >>> training.optimizer.close()
    """

    model: ModelT
    optimizer: Any
    loader: Any

    def save(self, path: str | os.PathLike[str], *, keep: int | None = None) -> Checkpoint:
        """Saves the whole training: what `prepare(resume=)` goes on with, on any number of shards.

        That is all that the optimizer's client has open: weights and optimizer state of each
        model, buffers, frozen tensors, tables; the account of samples; and what `prepare` keeps of
        each worker; all of one step. Rank 0 calls it, between two steps:
        behind all that the loop does after `step`.

        Args:
            path: See `Client.save_checkpoint`.
            keep: See there.

        Returns:
            The checkpoint.

        Raises:
            ArgumentError: the optimizer stays on the workers, whose state no shard has.
            ShardwellError: as `Client.save_checkpoint`.
        """
        if not isinstance(self.optimizer, ServerOptimizer):
            raise ArgumentError(
                f"this {type(self.optimizer).__name__} stays on the workers, and so does its "
                "state: torch.save() both on rank 0"
            )
        return save_training([self.optimizer], path, keep=keep)


def _keep(
    optimizer: ServerOptimizer, objects: Mapping[str, Any], batches: SharedBatches | None
) -> None:
    if objects and optimizer.parameter.spec.mode == "sync":
        optimizer.parameter.keep_state(objects, forms=[TensorForm()])
        if batches is not None:
            batches.before_step = functools.partial(_begin_step, weakref.ref(optimizer))


def _begin_step(of: weakref.ref[ServerOptimizer], has_made_steps: bool) -> None:
    optimizer = of()
    if optimizer is not None and not optimizer.parameter.is_closed:
        optimizer.parameter.note_state()
        if has_made_steps and optimizer.is_leaving:  # behind the whole step, which is kept
            raise SystemExit(EXIT_CODE)


def resume_training(
    client: Client, path: str | os.PathLike[str], name: str, crew: int | None
) -> None:
    """Restores the newest checkpoint, unless the cluster has the training already."""
    launcher = known_launcher(os.environ)
    if crew is not None and launcher is not None and launcher.rank:
        end_s = time.monotonic() + client.timeout_s
        while not _is_there(client, name):
            if time.monotonic() >= end_s:
                raise WorkersMissingError(
                    f"rank 0 has not restored or begun parameter {name!r} within "
                    f"{client.timeout_s:g} s; start it, with resume=, too",
                    parameter=name,
                )
            time.sleep(_RESUME_PAUSE_S)
        return
    if _is_there(client, name) or not is_there(path):
        return
    try:
        found = inspect_checkpoint(path)
        names = [each.name for each in found.parameters if each.spec.fragment is None]
        names = [each for each in [*names, *(each.name for each in found.families)] if each != name]
        tables = [each.name for each in found.tables]
        if names or tables:  # before that one, by which others see that all exists
            client.restore_checkpoint(found.path, names, tables, worker_count=crew)
        client.restore_checkpoint(found.path, [name], worker_count=crew)
    except ArgumentError:  # another worker was faster, where no launcher says which is to
        if (crew is not None and launcher is not None) or not _is_there(client, name):
            raise


def _is_there(client: Client, name: str) -> bool:
    return any(each.name == name and each.ready for each in all_rows(client.status()))


def _refuse(asked: Mapping[str, Any], why: str) -> None:
    for name, each in asked.items():
        if each is not None:
            raise ArgumentError(f"prepare({name}=): {why}")


def _prepared(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    client: Client | None,
    options: dict[str, Any],
    asked: Mapping[str, Any],
    resume: str | os.PathLike[str] | None,
) -> tuple[Any, ServerOptimizer | MeanGradients]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            "optimizer must be an optimizer of torch, such as "
            f"torch.optim.AdamW(model.parameters()); got {described(optimizer)}"
        )
    found = shards_rule(optimizer)
    crew = _crew(options)
    if isinstance(found, str) and (crew is None or not _OF_MEANS.issuperset(options)):
        known = ", ".join(f"{name}=" for name in sorted(_OF_MEANS))
        raise ArgumentError(
            f"{found}, so it stays on the workers, of which there is a fixed number, with {known} "
            "alone; pass torch.optim.SGD, Adam, AdamW, Adagrad or RMSprop for all other options"
        )
    if isinstance(found, str):
        _refuse(
            {**asked, "resume": resume},
            f"{found}, so weights and state stay on the workers, and shards keep nothing beside "
            "them; leave it out, as the object works without, torch.save() it with model and "
            "optimizer on rank 0, and load all on each worker before prepare(); or pass "
            "torch.optim.SGD, Adam, AdamW, Adagrad or RMSprop",
        )
    clip_norm = options.get("clip_norm", 0.0)
    check_number("clip_norm", clip_norm)
    client = client or _connected(str(options.get("name", _NAME)), crew)
    if isinstance(found, str):
        return _on_workers(model, optimizer, client, found, {**options, "worker_count": crew})
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise ArgumentError(
            f"this {type(optimizer).__name__} has made steps, or has loaded a state, which the "
            "shards do not have; pass one that is new: a training that goes on has its state on "
            "the cluster, and client.restore_checkpoint() brings back that of a checkpoint"
        )
    if resume is not None:
        resume_training(client, resume, str(options.get("name", _NAME)), crew)
    options = {name: given for name, given in options.items() if name != "clip_norm"}
    prepared = ServerOptimizer(
        model,
        client,
        dataclasses.replace(found.rule, clip_norm=clip_norm),
        param_groups=found.param_groups,
        **{**options, "worker_count": crew},
    )
    _hand_over(optimizer, prepared)
    return prepared, prepared


def _on_workers(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    client: Client,
    why: str,
    options: dict[str, Any],
) -> tuple[Any, ServerOptimizer | MeanGradients]:
    name = str(options.pop("name", _NAME))
    means = mean_gradients(optimizer, client, name=name, **options)
    sync: Any = means.sync
    parameter: Parameter[Any] = sync.parameter
    if parameter.next_step:
        means.close()
        raise ArgumentError(
            f"parameter {name!r} is at step {parameter.next_step}, and {why}: weights and state "
            "stay on the workers, and this one has none of that step; stop all workers, load a "
            "checkpoint of model and optimizer on each, and start them with another name=; or pass "
            "torch.optim.SGD, Adam, AdamW, Adagrad or RMSprop, whose state is on the shards",
            parameter=name,
        )
    _LOG.warning(
        "prepare: %s, so it stays on the workers and steps with the mean of their gradients: a "
        "worker that is killed ends the training of parameter %r, which goes on from a checkpoint "
        "of yours alone; torch.optim.SGD, Adam, AdamW, Adagrad and RMSprop run on the shards, and "
        "go on by themselves",
        why,
        name,
    )
    hand_over_model(client, f"{name}.first", model)
    optimizer.client = client  # type: ignore[attr-defined]
    return optimizer, means


def _crew(options: dict[str, Any]) -> int | None:
    """The number of workers that make a step; None: they come and go, or none waits for another."""
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
    """One id for all of this process, so that a cell of a notebook may be run again."""
    return unique_worker_id()


def _end(client: weakref.ref[Client]) -> None:
    ended = client()
    if ended is not None:
        error = getattr(sys, "last_value", None)  # which has ended the program
        ended.__exit__(type(error) if error is not None else None, error, None)


def _hand_over(optimizer: torch.optim.Optimizer, prepared: ServerOptimizer) -> None:
    """Lets schedulers of the optimizer set the rates of the one that steps, and nothing else."""
    optimizer.param_groups = prepared.param_groups

    def has_stepped(*_: Any) -> None:
        optimizer.__dict__["_opt_called"] = True  # schedulers warn of one that makes no steps

    if prepared.next_step:
        has_stepped()
    prepared.register_step_post_hook(has_stepped)

    def refuse(*_: Any) -> None:
        raise ArgumentError(
            f"this {type(optimizer).__name__} was given to prepare(), whose optimizer makes the "
            "steps: model, optimizer, loader = shardwell.torch.prepare(model, optimizer, loader)"
        )

    optimizer.register_step_pre_hook(refuse)


def _batches(
    stepper: ServerOptimizer | MeanGradients, samples: Samples, batches_per_step: int
) -> SharedBatches:
    """Returns the batches of a worker, which go with the gradients of its optimizer."""
    of: Any = stepper if isinstance(stepper, ServerOptimizer) else stepper.sync
    spec = of.parameter.spec  # which push_weights() makes another
    is_counted = spec.mode == "sync"
    is_fixed = is_counted and spec.members is None
    worker_count = spec.worker_count if is_fixed else 1
    if spec.members is not None:
        worker_count = spec.members.reference_count or 1
    count_of = functools.partial(batch_count, samples, worker_count, is_fixed)
    own = None
    if not is_counted:
        own = OwnDeals(samples, of.client.worker_id, of.next_step * batches_per_step)

    def take_last() -> None:
        """Takes the weights of what other members gave when this one had nothing left."""
        if spec.members is not None:
            rows = all_rows(of.client.status())
            of._take_weights(max(row.newest for row in rows if row.name == spec.name), None)

    found = SharedBatches(
        samples,
        lambda: own or of.parameter,
        count_of,
        is_counted=is_counted,
        take_last=take_last,
    )
    if isinstance(stepper, ServerOptimizer):
        stepper._step.backward.feed(found)
    else:
        stepper._backward.feed(found)
    return found
