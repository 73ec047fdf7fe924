"""A torch optimizer whose update runs on the shards.

gradient_step.py has the step and its states; trained_model.py and buffers.py have the model and its
flat memory. Here is what torch's optimizers have: groups, rates, state_dict.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Self

import torch

from shardwell.checkpoint.format import Checkpoint
from shardwell.client import Client, check_client
from shardwell.errors import ArgumentError, SpecMismatchError, UnknownParameterError
from shardwell.parameter.feedback import Outcome
from shardwell.parameter.parameter import LateName, Parameter
from shardwell.parameter.values import NamedArrays
from shardwell.placement.dealing import dealt
from shardwell.process.connected import Connected
from shardwell.rpc.cluster_status import all_rows
from shardwell.specs.members import Elastic
from shardwell.specs.optimizers import Average, Optimizer
from shardwell.specs.parameter import CodecName, ModeName
from shardwell.torch.buffers import (
    FlatTensors,
    ModelBuffers,
    check_readable,
    check_tensor,
    copy_all,
    sparse,
)
from shardwell.torch.embedding import TableModule
from shardwell.torch.gradient_step import GradientStep
from shardwell.torch.mistakes import check_call, check_model, described
from shardwell.torch.optimizer_state import (
    KEY,
    VALUES_KEY,
    Meeting,
    PushedValues,
    TrainingState,
    digest_of,
    replace,
    saved_values,
)
from shardwell.torch.param_groups import GroupRates, groups_of, rate_of, torch_options
from shardwell.torch.plain_names import PlainNames
from shardwell.torch.threads import watch_threads
from shardwell.torch.trained_model import TrainedModel, Training, close_earlier
from shardwell.torch.untrained import Untrained

_LOG = logging.getLogger("shardwell")
_CALL = "shardwell.torch.ServerOptimizer(model, client, shardwell.AdamW(3e-4), worker_count=2)"


class ServerOptimizer(Connected, torch.optim.Optimizer):
    """Trains a model on a cluster: gradients are averaged over all workers and applied there.

    It is a `torch.optim.Optimizer`: `step`, `zero_grad`, `param_groups`; torch's LR schedulers
    drive the shards' rate. The model gets the first worker's weights, or those that the cluster has
    already: then it goes on from there.

    Gradients leave while backward goes on, if nothing changes them between `backward` and `step`:
    the first step shows whether something clips, unscales or accumulates them there. A parameter
    without a gradient has one of zeros; other than in torch, momentum and weight decay go on for
    it. A `step` without any gradient does nothing, as in torch; a worker that has no batch for a
    step sets `sample_count = 0`, and its step counts with the weight 0.

    A `step` that fails is made good by the next one: call it again, or go on with another batch.
    NaN and infinity do not count: parts of the step that had not left count as zeros.

    With `members`, workers come and go while training goes on. A worker that comes gets the
    cluster's weights, never gives its own, and takes part with its first gradient; one that was
    lost does so, too, by itself, and keeps its model and state. `outcome` says what counted.

    Args:
        model: Its parameters that require gradients are trained, under their names. They may be on
            any device, float32, float64, float16 or bfloat16; shards have float32. Names of
            wrappers (`_orig_mod.` of torch.compile, `module.` of DDP) are left out. Frozen
            parameters stay on the workers, and must be the same on all. Buffers are made those of
            the first worker, and are each worker's own then: see `average_buffers`.
        client: Made by `shardwell.connect`. It stays the caller's to close.
        optimizer: The update rule on the shards, such as `shardwell.AdamW(3e-4)`.
        param_groups: Groups as torch has them: tensors, pairs of name and tensor, or dicts with
            "params", and "lr" or "weight_decay" of their own; keys that no optimizer of torch has,
            such as "name" or "lr_scale", stay the caller's. Default: one group of all.
        worker_count: Workers that make a step; default: 1.
        members: In place of worker_count: workers come and go; see `Elastic`. Each draws batches of
            its own, and loops while `next_step` is below the last: it may skip steps.
        min_contributors: See `Client.parameter`.
        grace_s: See `Client.parameter`.
        late: See `Client.parameter`.
        name: Name of the parameter on the cluster.
        codec: How gradients and weights travel; see `Client.parameter`.
        mode: "sync" or "async"; see `Client.parameter`.
        overlap: Whether gradients leave while backward goes on. False: nothing is sent before
            `step` has looked at all of them. True: clip by the update rule's `clip_norm`, and
            accumulate under `no_sync`. "auto", the default: the first step sends nothing before
            `step`; if something changed its gradients after backward, such as clipping, a
            GradScaler or a second backward pass, the others go on like that.
        broadcast_frozen: Whether the shards keep the frozen parameters, too, so that a worker
            without the first worker's gets them. All workers give the same.
        leave_on_sigterm: Whether SIGTERM, where the program has no handler of it, lets the step
            under way end, and then the program: see `is_leaving`. Default: where the others go on
            without this worker; with a fixed `worker_count` they wait until it is started again,
            so it may as well be killed.
        timeout_s: Bound of a step; default: the client's.

    Raises:
        SpecMismatchError: the cluster has another model under that name, or the first worker has
            another value of a frozen parameter; names the tensor.
        ArgumentError: a tensor, a group or an option can't be; names it.
        ShardwellError: as `Client.parameter`.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> rule = shardwell.AdamW(lr=1e-2)
        >>> optimizer = shardwell.torch.ServerOptimizer(model, client, rule, name="example")
        >>> while optimizer.next_step < 3:
        ...     loss = model(torch.ones(4, 3)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()  # the mean over all workers, updated on the shards
        ...     optimizer.zero_grad()
        >>> optimizer.close()
    """

    _elsewhere = (
        "keep optimizer.state_dict() instead, and make a ServerOptimizer in the other process, "
        "with a client that is connected there"
    )

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuses arguments as of torch's optimizers, by name."""
        check_call(cls, _CALL, args, options)
        made: Self = super().__new__(cls)
        return made

    def __init__(
        self,
        model: torch.nn.Module,
        client: Client,
        optimizer: Optimizer,
        *,
        param_groups: Iterable[Any] | None = None,
        worker_count: int | None = None,
        members: Elastic | None = None,
        min_contributors: int = 0,
        grace_s: float = 0.0,
        late: LateName = "drop",
        name: str = "model",
        codec: CodecName = "fp16",
        mode: ModeName = "sync",
        overlap: bool | Literal["auto"] = "auto",
        broadcast_frozen: bool = False,
        leave_on_sigterm: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        check_model(model, _CALL)
        check_client(client)
        self.sample_count = 1
        """Weight of this worker's next gradients in the mean, such as the number of samples."""
        self.saves_values = False
        """True if `state_dict` has weights and the update rule's arrays, too."""
        if isinstance(optimizer, Average) or not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                "optimizer must be an update rule, as shardwell.AdamW(3e-4); got "
                f"{described(optimizer)}; expected {_CALL}; an optimizer of torch goes into "
                "shardwell.torch.prepare(model, optimizer), which makes the rule of it"
            )
        if overlap not in (True, False, "auto"):
            raise ArgumentError(f"overlap must be True, False or 'auto'; got {overlap!r}")
        self.timeout_s = timeout_s
        """Bound of a step, which may be set; None: the client's."""
        self.client = client
        """Client of the cluster: its `rank`, `save_checkpoint`."""
        groups = groups_of(model, param_groups, optimizer)
        super().__init__(groups, {"lr": rate_of(optimizer), **torch_options(optimizer)})
        self._rates = GroupRates(optimizer, self.param_groups)
        names = PlainNames(model)
        tensors, names_of_groups = _trained(model, names, self.param_groups)
        self._training = Training(
            client=client,
            name=name,
            options={
                "groups": self._rates.tensor_groups(names_of_groups),
                "optimizer": optimizer,
                **Elastic.crew(worker_count, members),
                "min_contributors": min_contributors,
                "grace_s": grace_s,
                "late": late,
                "codec": codec,
                "mode": mode,
            },
            timeout_s=timeout_s,
        )
        if members is not None:
            _check_tables(model)
        self.parameter: Parameter[NamedArrays] = _opened(self._training, tensors)
        """The parameter on the cluster: `next_step`, `version`, `reopen`."""
        spec = self.parameter.spec
        assert spec.layout is not None
        left_out = {
            key
            for key, tensor in names.of(model.named_parameters()).items()
            if tensor.requires_grad and key not in tensors
        }
        tensors = {tensor.name: tensors[tensor.name] for tensor in spec.layout}
        self._model = TrainedModel(model, names, tensors, "ServerOptimizer", left_out)
        self._buffers = ModelBuffers(tensors.values(), spec.layout)
        self._step = GradientStep(
            self.parameter,
            self._model,
            self._buffers,
            overlap,
            self,
            lambda: self._rates.rate(self.param_groups),
        )
        self._overlap = overlap
        self._meeting: Meeting | None = None
        """Meeting of all workers, once this one has pushed something."""
        # A GradScaler then leaves scaling back to `step`, which it calls for each step: one that it
        # skips alone would be waited for by other workers.
        has_others = spec.mode == "sync" and (spec.members is not None or spec.worker_count > 1)
        self._step_supports_amp_scaling = overlap is True or bool(_tables(model)) or has_others
        self.parameter.init(self._buffers.weights.arrays)
        self.parameter.on_give_again = weakref.WeakMethod(self._read_weights)
        self._read_weights(timeout_s)
        self._untrained = Untrained(self._model, self._training, broadcast_frozen=broadcast_frozen)
        if not self._buffers.is_on_gpu:
            watch_threads(self, client, self.parameter)
        self._close_earlier()
        add = self._step.add
        self._model.attach(
            [tensor.register_post_accumulate_grad_hook(add) for tensor in tensors.values()],
            spec,
            leave_on_sigterm,
        )
        if self.next_step:
            self._opt_called = True  # schedulers warn of an optimizer that has made no step
            _LOG.warning(
                "worker %r %s parameter %r at step %d, with the cluster's weights; a schedule has "
                "its step by prepare(schedule=), or else is at one of its own: while "
                "schedule.last_epoch < optimizer.next_step: schedule.step(); for a new training "
                "give another name=, or delete that one first: shardwell delete %s",
                client.worker_id,
                "goes on with" if members is None else "joins the training of",
                name,
                self.next_step,
                name,
            )

    def _close_earlier(self) -> None:
        """Closes ServerOptimizers that hold the same tensors, whose gradients are for this one."""

        def close(step: GradientStep) -> None:
            step.close()
            _LOG.warning(
                "the ServerOptimizer of parameter %r was closed: another one, of parameter %r, "
                "trains the same model from now on",
                step.parameter.name,
                self.parameter.name,
            )

        tensors = self._model.tensors.values()
        hooks = [getattr(each, "_post_accumulate_grad_hooks", None) for each in tensors]
        close_earlier((hook for of in hooks if of for hook in of.values()), GradientStep, close)

    @property
    def next_step(self) -> int:
        """The step that this worker's next gradients join, where a loop that starts again goes on.

        In asynchronous mode, this worker's own count.
        """
        return self.parameter.next_step

    @property
    def is_leaving(self) -> bool:
        """True if SIGTERM has come, or an operator drains this worker (`shardwell members drain`).

        `step` makes the step under way as ever. A loop that looks here ends by itself then; the
        next `step` of any other raises SystemExit(143) once it is made, which ends `with` blocks
        in order. A second SIGTERM ends the process at once.
        """
        return self._model.is_leaving

    @property
    def outcome(self) -> Outcome | None:
        """The part of this worker's last gradient that the shards counted; None: it gave none."""
        return self.parameter.outcome

    # What torch's optimizers have.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the step: waits for the other workers and takes the weights.

        Does nothing if no parameter has a gradient, unless `sample_count` is 0; nor with rates of 0
        and gradients of zeros that no backward pass made, by which
        `torch.distributed.checkpoint.state_dict` makes an optimizer's state.

        Args:
            closure: Computes the loss and its gradients first; called once.

        Raises:
            NonFiniteError: a gradient is not finite; names the tensor. If a part had left by then,
                the step is over, and the rest counted as zeros; else it is open still.
            ArgumentError: a gradient or the model has changed, in a way that can't count; or the
                gradients are those that the last step counted.
            DivergedError: the weights that came of the step are not finite; it is over.
            ShardwellError: as `Parameter.exchange`.
            SystemExit: see `is_leaving`.
        """
        with self._ending_in_step(), self._model.step(self._is_draining):
            found_inf, scale = self._left_by_scaler()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if found_inf is not None or not self._step.backward.makes_state(self):
                self._step.make(found_inf, scale)
            if found_inf is not None:  # which the scaler removes
                self.found_inf, self.grad_scale = found_inf, scale
            return loss

    @contextlib.contextmanager
    def _ending_in_step(self) -> Iterator[None]:
        try:
            yield
        except SystemExit:  # what the loop does behind the step, it does not do
            self.parameter.drop_state()
            raise

    def _is_draining(self) -> bool:
        return self.parameter.is_draining

    @torch.no_grad()
    def skip_step(self) -> None:
        """Ends the step without a gradient of this worker: it counts with the weight 0.

        The others do not wait for it, and their gradients count. Where all skip a step, it changes
        nothing. Gradients of this worker that had left count, and a log line says so. In
        asynchronous mode, where no worker waits, it does nothing.

        Raises:
            ShardwellError: as `Parameter.exchange`; the next step makes good for it.
            SystemExit: see `is_leaving`.
        """
        with self._model.step(self._is_draining):
            self._step.skip()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients.

        Raises:
            ArgumentError: a part of them had left, for a step that was not made: it counts in the
                next, which others wait for. Gradients that are for no step, such as those of
                another loss through the same model, are computed under `no_sync`.
        """
        super().zero_grad(set_to_none)
        self._step.forget(are_zeros=not set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state, of the rates alone, and the training: name, step, weights' digest.

        The update rule's arrays stay on the shards, in whose checkpoints they are; with
        `saves_values` they are in the state, too, by tensor, through a temporary directory.

        Raises:
            ArgumentError: some gradients of a step have left, which has not ended; or values are
                asked for in asynchronous mode, or where steps may close without this worker.
            ShardwellError: with `saves_values`, as `Client.save_checkpoint`.
        """
        self._step.check_between("state_dict()")
        own = self._training_state()
        state: dict[str, Any] = {**super().state_dict(), KEY: asdict(own)}
        if self.saves_values:
            if self.parameter.spec.mode == "async":
                raise ArgumentError("saves_values is for mode='sync': others have no one version")
            if self.parameter.spec.has_open_sets:
                raise ArgumentError(
                    "saves_values is for a fixed worker_count, whose workers are all at one step; "
                    "with members= or min_contributors= the others go on: client.save_checkpoint() "
                    "has weights and arrays of one step"
                )
            state[VALUES_KEY] = saved_values(self.client, self.parameter, own.version)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the rates that a state has, if the cluster is where the state was saved.

        Where it is elsewhere, and the state has values (`saves_values`), they replace the
        cluster's: all workers load the same state then. The model gets them, and training goes on
        at the state's step. Where steps may close without this worker, as with `members`, the
        cluster may have gone on since, and the worker goes on there.

        Raises:
            ArgumentError: the state is another optimizer's; or of another training or step, and
                without values; or its groups have other options. Nothing was changed. Or as
                `push_weights`.
            ShardwellError: as `push_weights`.
        """
        found = TrainingState.of(state_dict)
        self._step.check_between("load_state_dict()")
        now, spec = self._training_state(), self.parameter.spec
        values: PushedValues | None = None
        try:
            found.check_goes_on(
                now, is_sync=spec.mode == "sync", may_go_on_alone=spec.has_open_sets
            )
        except ArgumentError:
            if VALUES_KEY not in state_dict or found.name != now.name:
                raise
            self._check_all_meet("load_state_dict() of a state with values")
            values = PushedValues.of(state_dict[VALUES_KEY], self.parameter.spec, found.version)
        before = self.param_groups
        try:
            super().load_state_dict(
                {k: v for k, v in state_dict.items() if k not in (KEY, VALUES_KEY)}
            )
            self._rates.rate(self.param_groups)
        except (ArgumentError, KeyError, ValueError) as error:
            self.__dict__["param_groups"] = before
            raise ArgumentError(f"load_state_dict: {error}") from None
        if values is not None:
            self._replace(values)

    def push_weights(self) -> None:
        """Makes the model's weights the cluster's, on purpose; blocks until all workers call it.

        Such as after `model.load_state_dict`. A new training begins with them, at step 0 and with
        new arrays of the update rule: the parameter is deleted and made again, which takes the
        right `admin`, or `create` and the token that made it. All workers push the same weights.
        `load_state_dict` of a state with values goes back to a step with all that belongs to it.

        Raises:
            ArgumentError: another worker pushes other weights, a step has not ended, or workers
                come and go (`members`); nothing was changed. Or a worker was started again
                meanwhile, and the parameter is gone.
            WorkersMissingError: other workers do not push; nothing was changed.
            ShardwellError: as `Client.delete` and `Client.parameter`.
        """
        self._check_all_meet("push_weights()")
        self._step.check_between("push_weights()")
        flat = FlatTensors(self._buffers.layout)
        copy_all(flat.views, [tensor.detach() for tensor in self._model.tensors.values()])
        weights = flat.arrays.buffer(self._buffers.layout)
        assert weights is not None
        self._replace(PushedValues({"weights": weights}))

    def _replace(self, values: PushedValues) -> None:
        old, tensors = self.parameter, self._model.tensors
        if self._meeting is None:
            self._meeting = Meeting(self.client, old.name, old.spec.worker_count)
        self.parameter = replace(
            self.client,
            old,
            values,
            self._meeting,
            # Pushed values have the order of the parameter, which may be another version's.
            lambda: _opened(self._training, tensors, order=list(tensors)),
            timeout_s=self.timeout_s,
        )
        old.hand_state_to(self.parameter)
        self._step.restart(self.parameter)
        self._take_weights(0, self.timeout_s)

    def _take_weights(self, min_version: int, timeout_s: float | None) -> None:
        self._buffers.await_uploads()
        self.parameter.get_weights(
            out=self._buffers.weights.arrays, min_version=min_version, timeout_s=timeout_s
        )
        self._buffers.put_weights()

    def _read_weights(self, timeout_s: float | None = None) -> None:
        # Started again, it goes on from the step that it had ended, which may wait for the others.
        is_sync = self.parameter.spec.mode == "sync"
        self._take_weights(self.parameter.next_step if is_sync else 0, timeout_s)

    def _check_all_meet(self, what: str) -> None:
        if self.parameter.spec.members is not None:
            raise ArgumentError(
                f"{what} waits until all workers call it, and with members= these are not known: "
                "a worker that comes later would miss it; begin a training under another "
                "name= with these weights, or client.restore_checkpoint() before workers start"
            )

    def _training_state(self) -> TrainingState:
        is_sync = self.parameter.spec.mode == "sync"
        return TrainingState(
            name=self.parameter.name,
            version=self.parameter.next_step if is_sync else self.parameter.version,
            digest=digest_of(zip(self._model.tensors, self._buffers.weights.views, strict=True)),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses groups after the constructor's: all workers agreed on the trained tensors.

        Raises:
            ArgumentError: afterwards.
        """
        if hasattr(self, "parameter"):
            raise ArgumentError(
                "parameters can't be added after the start, for all workers have agreed on them; "
                "make another ServerOptimizer, with another name"
            )
        super().add_param_group(param_group)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets gradients of batches accumulate: nothing leaves in the block, as in DDP's.

        The backward pass of the last batch comes after it. The model's layers of tables wait, too.
        """
        before, self._step.is_paused = self._step.is_paused, True
        try:
            with contextlib.ExitStack() as layers:
                for module in _tables(self._model.model):
                    layers.enter_context(module.no_sync())
                yield
        finally:
            self._step.is_paused = before

    # Beside it.

    def average_buffers(self, *, timeout_s: float | None = None) -> None:
        """Makes buffers, such as BatchNorm's statistics, the mean of all workers'; all call it.

        Before an evaluation or a checkpoint, say: each worker's are of its own batches. Means are
        of floating point numbers, made in float32; integers and all else stay each worker's own.

        Raises:
            ArgumentError: the mode is "async", which has no steps to meet at, or workers come and
                go (`members`).
            ShardwellError: as `Parameter.exchange`.
        """
        self._untrained.average(timeout_s)

    def close(self) -> None:
        """Takes the hooks off the model, and does not note SIGTERM any more.

        The client is the caller's to close.
        """
        self._step.close()

    def _left_by_scaler(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns a scaler's `found_inf` and scale; None each: none, or it scaled back itself."""
        found_inf = self.__dict__.pop("found_inf", None)
        scale = self.__dict__.pop("grad_scale", None)
        if found_inf is not None and self._overlap is True:
            raise ArgumentError(
                "a GradScaler scales gradients back when they have left already; pass overlap=False"
            )
        if found_inf is not None and _tables(self._model.model):
            raise ArgumentError(
                "a GradScaler does not scale back gradients of a table's rows, which backward "
                "pushes; train in bfloat16, which needs none"
            )
        return found_inf, scale


def save_training(
    optimizers: Sequence[ServerOptimizer],
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
) -> Checkpoint:
    """Saves all that a client trains: what optimizers and models have, and what it has open."""
    names = [each.parameter.name for each in optimizers]
    models = [each._model.model for each in optimizers]
    return save_open(optimizers[0].client, path, names, models, keep=keep)


def save_open(
    client: Client,
    path: str | os.PathLike[str],
    names: Iterable[str],
    models: Iterable[torch.nn.Module],
    *,
    keep: int | None = None,
) -> Checkpoint:
    """Saves what a client has open, parameters of more names, what is beside them, and tables."""
    opened, tables = client.open_names()
    own = {*opened, *names}
    beside = re.compile(rf"(?:{'|'.join(map(re.escape, own))})\.(?:first|frozen(?:\.[0-9]+)?)")
    known = [each.name for each in all_rows(client.status()) if each.ready]
    found = [name for name in known if name in own or beside.fullmatch(name)]
    tables += [module.table.name for each in models for module in _tables(each)]
    return client.save_checkpoint(path, found, list(dict.fromkeys(tables)), keep=keep)


def _tables(model: torch.nn.Module) -> list[TableModule]:
    return [module for module in model.modules() if isinstance(module, TableModule)]


def _check_tables(model: torch.nn.Module) -> None:
    for module in _tables(model):
        spec = module.table.spec
        if spec.mode == "sync" and spec.members is None:
            raise ArgumentError(
                f"table {spec.name!r} of the model has {spec.crew} for good, and would wait for "
                "one that has gone; with members= open it with members= or mode='async', too"
            )


def _trained(
    model: torch.nn.Module, names: PlainNames, groups: Iterable[Mapping[str, Any]]
) -> tuple[dict[str, torch.nn.Parameter], list[list[str]]]:
    known = {id(tensor): name for name, tensor in names.of(model.named_parameters()).items()}
    tensors: dict[str, torch.nn.Parameter] = {}
    names_of_groups: list[list[str]] = []
    for group in groups:
        own: list[str] = []
        for tensor in group["params"]:
            if id(tensor) not in known:
                raise ArgumentError("param_groups have a tensor that the model does not have")
            if tensor.requires_grad:  # torch finds no gradient at others
                check_tensor(known[id(tensor)], tensor)
                tensors[known[id(tensor)]] = tensor
                own.append(known[id(tensor)])
        names_of_groups.append(own)
    if not tensors:
        raise ArgumentError("the model has no parameter that requires a gradient")
    for module_name, module in model.named_modules():
        weight_name = names(f"{module_name}.weight")
        if getattr(module, "sparse", False) and weight_name in tensors:
            raise sparse(weight_name)
    for tensor_name, each in model.state_dict(keep_vars=True).items():
        if isinstance(each, torch.Tensor):
            check_readable(tensor_name, each)
    return tensors, names_of_groups


def _opened(
    training: Training,
    tensors: Mapping[str, torch.Tensor],
    *,
    order: Sequence[str] | None = None,
) -> Parameter[NamedArrays]:
    """Opens a model's parameter; a new one has `order`, or else that in which gradients come."""
    client, name = training.client, training.name
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    try:
        layout = client.parameter(name).spec.layout
    except UnknownParameterError:
        last_first = {key: math.prod(shapes[key]) for key in reversed(list(shapes))}
        order = order or dealt(last_first, client.shard_count)
    else:
        there = layout.by_name if layout else {}
        only_there = [key for key in there if key not in shapes]
        only_here = [key for key in shapes if key not in there]
        if only_there or only_here:
            who, key = ("cluster's", only_there[0]) if only_there else ("worker's", only_here[0])
            raise SpecMismatchError(
                f"parameter {name!r} is of another model: only the {who} has a tensor {key!r}; "
                "give all workers the same model, or this one another name=",
                parameter=name,
            )
        order = list(there)
    in_order = {key: shapes[key] for key in order}
    parameter = client.parameter(name, tensors=in_order, **training.options)
    parameter.advise_on_non_finite(
        "zero_grad() and go on with another batch, lower the learning rate, or clip with "
        "clip_norm= of the optimizer"
    )
    return parameter
