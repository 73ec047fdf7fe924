"""A torch optimizer whose update runs on the shards.

States of a step, by tensor: *missing* until its gradient has been accumulated, then *announced*:
copied into the flat buffer, from a GPU without waiting (device_copies.py), and sent from there
while backward goes on. `step` copies what is
missing, or, where nothing has left, sends what is large from where it lies; it waits for the
weights and puts them into the model. Invariants: a tensor is announced once a step; a gradient that
changes after some of the step may have left is an error, not a surprise; if nothing has left, all
announcements of the step are taken back, and `step` copies everything. With overlap="auto" nothing
is announced in the first step, which is watched (GradientWatch) and decides about the others. A
step that failed after something of it may have been counted is *owed*: it is made good with the
same values, of which there is a copy by then, before the next begins.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch

from shardwell.client import Client, check_client
from shardwell.errors import (
    ArgumentError,
    NonFiniteError,
    ShardwellError,
    SpecMismatchError,
    UnknownParameterError,
)
from shardwell.numerics.tensors import LARGE_ELEMENT_COUNT
from shardwell.parameter.feedback import Outcome
from shardwell.parameter.open_exchange import OpenExchange
from shardwell.parameter.parameter import LateName, Parameter
from shardwell.parameter.values import NamedArrays
from shardwell.placement.dealing import dealt
from shardwell.process.connected import Connected
from shardwell.specs.layout import TensorLayout
from shardwell.specs.members import Elastic
from shardwell.specs.optimizers import Average, Optimizer
from shardwell.specs.parameter import CodecName, ModeName
from shardwell.torch.buffers import (
    FlatTensors,
    check_readable,
    check_tensor,
    copy_all,
    is_sent_in_place,
)
from shardwell.torch.device_copies import DeviceCopies
from shardwell.torch.embedding import TableModule
from shardwell.torch.gradient_watch import BackwardWatch, GradientWatch
from shardwell.torch.mistakes import check_call, check_model, described
from shardwell.torch.optimizer_state import KEY, VALUES_KEY, TrainingState, digest_of
from shardwell.torch.param_groups import GroupRates, groups_of, rate_of, torch_options
from shardwell.torch.plain_names import PlainNames
from shardwell.torch.pushed_values import Meeting, PushedValues, replace, saved_values
from shardwell.torch.threads import watch_threads
from shardwell.torch.untrained import Untrained
from shardwell.training.leave_request import LeaveRequest, go_on_without

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
        """Whether `state_dict` has weights and the update rule's arrays, too."""
        if isinstance(optimizer, Average) or not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                "optimizer must be an update rule, as shardwell.AdamW(3e-4); got "
                f"{described(optimizer)}; expected {_CALL}; an optimizer of torch goes into "
                "shardwell.torch.prepare(model, optimizer), which makes the rule of it"
            )
        if overlap not in (True, False, "auto"):
            raise ArgumentError(f"overlap must be True, False or 'auto'; got {overlap!r}")
        self._model = model
        self.timeout_s = timeout_s
        """Bound of a step, which may be set; None: the client's."""
        self._is_auto = overlap == "auto"
        self._overlaps = overlap is True
        """Whether gradients leave in backward, from the next one on."""
        self._watch = GradientWatch() if self._is_auto else None
        """Until the first step has shown whether gradients change after backward."""
        self._backward = BackwardWatch()
        self._is_late = False
        """Whether this step's gradients were found to change, so that `step` copies all of them."""
        self._has_run_backward = False
        """Whether a backward pass made gradients since the last step."""
        self._is_paused = False
        self._names = PlainNames(model)
        named = self._names.of(model.named_parameters())
        names = {id(tensor): name for name, tensor in named.items()}
        groups = groups_of(model, param_groups, optimizer)
        super().__init__(groups, {"lr": rate_of(optimizer), **torch_options(optimizer)})
        self._rates = GroupRates(optimizer, self.param_groups)
        self._tensors: dict[str, torch.nn.Parameter] = {}
        names_of_groups: list[list[str]] = []
        for group in self.param_groups:
            own: list[str] = []
            for tensor in group["params"]:
                if id(tensor) not in names:
                    raise ArgumentError("param_groups have a tensor that the model does not have")
                if not tensor.requires_grad:  # as torch, which finds no gradient there
                    continue
                tensor_name = names[id(tensor)]
                check_tensor(tensor_name, tensor)
                self._tensors[tensor_name] = tensor
                own.append(tensor_name)
            names_of_groups.append(own)
        if not self._tensors:
            raise ArgumentError("the model has no parameter that requires a gradient")
        for module_name, module in model.named_modules():
            weight_name = self._names(f"{module_name}.weight")
            if getattr(module, "sparse", False) and weight_name in self._tensors:
                raise _sparse(weight_name)
        for tensor_name, each in model.state_dict(keep_vars=True).items():
            if isinstance(each, torch.Tensor):
                check_readable(tensor_name, each)
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.client = client
        """Client of the cluster: its `rank`, `save_checkpoint`."""
        self._meeting: Meeting | None = None
        """Meeting of all workers, once this one has pushed something."""
        self._opened = partial(
            _opened,
            client,
            name,
            shapes,
            groups=self._rates.tensor_groups(names_of_groups),
            optimizer=optimizer,
            **Elastic.crew(worker_count, members),
            min_contributors=min_contributors,
            grace_s=grace_s,
            late=late,
            codec=codec,
            mode=mode,
        )
        if members is not None:
            self._check_tables()
        self.parameter: Parameter[NamedArrays] = self._opened()
        """The parameter on the cluster: `next_step`, `version`, `reopen`."""
        assert self.parameter.spec.layout is not None
        self._layout: TensorLayout = self.parameter.spec.layout
        self._tensors = {tensor.name: self._tensors[tensor.name] for tensor in self._layout}
        self._is_on_gpu = any(tensor.is_cuda for tensor in self._tensors.values())
        """Whether it was when the buffers were made."""
        self._gradients = FlatTensors(self._layout, is_pinned=self._is_on_gpu)
        self._weights = FlatTensors(self._layout, is_pinned=self._is_on_gpu)
        self._copies = DeviceCopies()
        """Copies of gradients, from a GPU to their buffer."""
        self._uploads: list[Any] = []
        """GPUs' events behind the copies of the weights from their buffer."""
        self._large = {
            place for place, tensor in enumerate(self._layout) if tensor.size >= LARGE_ELEMENT_COUNT
        }
        """Gradients that take longer to copy than to look at."""
        self._places = {id(tensor): place for place, tensor in enumerate(self._tensors.values())}
        self._begun: OpenExchange[NamedArrays] | None = None
        self._options: dict[str, Any] = {}
        """The options with which it was begun."""
        self._owed: Callable[[], object] | None = None
        """Ends a step that failed, with the same values."""
        self._failed: list[tuple[torch.Tensor | None, int]] = []
        """The gradients of that step."""
        self._counted: list[tuple[weakref.ref[torch.Tensor] | None, int]] = []
        """The gradients of the step that was counted last, and their versions by torch's count."""
        self._scaled_back: list[tuple[torch.Tensor | None, int]] = []
        """The gradients that were divided by a scaler's scale last."""
        self._versions: dict[int, int] = {}
        """Versions of the weights, by torch's count, when a step had put them there."""
        # Backward has a thread for each device.
        self._lock = threading.Lock()
        # A GradScaler then leaves scaling back to `step`, which it calls for each step: one that it
        # skips alone would be waited for by other workers.
        spec = self.parameter.spec
        has_others = spec.mode == "sync" and (spec.members is not None or spec.worker_count > 1)
        self._step_supports_amp_scaling = overlap is True or bool(self._tables) or has_others
        self._announced: dict[int, tuple[torch.Tensor, int]] = {}
        """By place: the gradient, and its version by torch's count."""
        self._left_out = {
            tensor_name
            for tensor_name, tensor in named.items()
            if tensor.requires_grad and tensor_name not in self._tensors
        }
        """Tensors that are in no group."""
        copy_all(self._weights.views, [tensor.detach() for tensor in self._tensors.values()])
        self.parameter.init(self._weights.arrays)
        self.parameter.on_give_again = weakref.WeakMethod(self._read_weights)
        self._read_weights(timeout_s)
        self._untrained = Untrained(
            model,
            self._names,
            self._tensors,
            client,
            name,
            worker_count=None if members is not None else spec.worker_count,
            mode=mode,
            broadcast_frozen=broadcast_frozen,
            timeout_s=timeout_s,
        )
        if not self._is_on_gpu:
            watch_threads(self, client, self.parameter)
        self._close_earlier()
        if leave_on_sigterm is None:
            leave_on_sigterm = go_on_without(self.parameter.spec)
        self._leave = LeaveRequest()
        if leave_on_sigterm:
            self._leave.open()
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(self._has_gradient)
            for tensor in self._tensors.values()
        ]
        if self.next_step:
            self._opt_called = True  # schedulers warn of an optimizer that has made no step
            _LOG.warning(
                "worker %r %s parameter %r at step %d, with the cluster's weights; a schedule that "
                "is made or loaded now is at a step of its own: while schedule.last_epoch < "
                "optimizer.next_step: schedule.step(); for a new training give another name=, or "
                "delete that one first: shardwell delete %s",
                client.worker_id,
                "goes on with" if members is None else "joins the training of",
                name,
                self.next_step,
                name,
            )

    def _close_earlier(self) -> None:
        """Closes ServerOptimizers that hold the same tensors, as after a notebook's cell ran twice.

        Their hooks would send gradients that are for this one.
        """
        hooks = [
            getattr(each, "_post_accumulate_grad_hooks", None) for each in self._tensors.values()
        ]
        owners = [getattr(hook, "__self__", None) for of in hooks if of for hook in of.values()]
        for owner in {id(each): each for each in owners}.values():
            if isinstance(owner, ServerOptimizer):
                owner.close()
                _LOG.warning(
                    "the ServerOptimizer of parameter %r was closed: another one, of parameter %r, "
                    "trains the same model from now on",
                    owner.parameter.name,
                    self.parameter.name,
                )

    @property
    def next_step(self) -> int:
        """The step that this worker's next gradients join, where a loop that starts again goes on.

        In asynchronous mode, this worker's own count.
        """
        return self.parameter.next_step

    @property
    def is_leaving(self) -> bool:
        """Whether SIGTERM has come, or an operator drains this worker (`shardwell members drain`).

        `step` makes the step under way as ever. A loop that looks here ends by itself then; the
        next `step` of any other raises SystemExit(143) once it is made, which ends `with` blocks
        in order. A second SIGTERM ends the process at once.
        """
        return self._leave.has_come

    @property
    def outcome(self) -> Outcome | None:
        """What the shards counted of this worker's last gradient; None: it gave none."""
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
        with self._leave.ending_after_step():
            found_inf, scale = self._left_by_scaler()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._make_step(found_inf, scale)
            self._leave.has_come |= self.parameter.is_draining
            if found_inf is not None:  # which the scaler removes
                self.found_inf, self.grad_scale = found_inf, scale
            return loss

    def _make_step(self, found_inf: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """What `step` does once gradients are there."""
        if found_inf is None and self._backward.makes_state(self):
            return
        if self._owed is not None:
            failed = self._failed
            self._settle()
            now = self._gradient_versions()
            pairs = list(zip(failed, now, strict=False))
            if failed and all(a[0] is b[0] and a[1] == b[1] for a, b in pairs):
                return  # it was this step that failed
        if found_inf is not None and float(found_inf) > 0:
            self._skip()
            return
        if scale is not None:
            self._scale_back(scale)
        if self._begun is None:
            self._check_model()
            self._follow_device()
            if not self._has_new_gradients():
                return
        self._end_watch()
        self._check_announced()
        options = self._exchange_options()
        self._copies.wait()
        lying = self._copy_missing()
        begun, self._begun = self._begun, None
        self._announced.clear()
        self._is_late = False
        self._end_step(begun, options, lying)

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
        with self._leave.ending_after_step():
            self._skip()
            self._leave.has_come |= self.parameter.is_draining

    def _skip(self) -> None:
        self._settle()
        self._copies.wait()  # which write to where `forget` writes
        begun, self._begun = self._begun, None
        self._announced.clear()
        self._is_late = False
        if self._watch is not None:
            self._watch.begin_anew()  # this step shows nothing
        if begun is not None:
            begun.forget()
        if begun is not None and begun.has_left:
            _LOG.warning(
                "parameter %r: step %d is skipped, and a part of its gradients had left, which "
                "counts; overlap=False keeps all of them until step()",
                self.parameter.name,
                self.next_step,
            )
            self._end_by(self._ending(begun, self._options))
        elif self.parameter.spec.mode == "sync":
            self._end_by(self._ending(None, {**self._exchange_options(), "gradient": None}))

    def _end_by(self, end: Callable[[], object]) -> None:
        """Ends a step by a call, and takes the weights; what fails is owed."""
        step, taken = self.parameter.next_step, self._gradient_versions()
        try:
            end()
        except BaseException:
            if self.parameter.next_step == step:
                self._owed, self._failed = end, taken
            raise
        finally:
            self._has_counted(taken)
        self._take_weights()

    def _has_new_gradients(self) -> bool:
        """Whether a step has something to count.

        Raises:
            ArgumentError: all gradients are those that the last step counted.
        """
        now = self._gradient_versions()
        if self.sample_count == 0:
            return True
        if all(grad is None for grad, _ in now):
            return False
        if self._has_run_backward:
            return True
        before = self._counted or [(None, -1)] * len(now)
        if all(
            grad is None or (known is not None and known() is grad and version == own)
            for (grad, own), (known, version) in zip(now, before, strict=True)
        ):
            raise ArgumentError(
                "step() without a backward pass since the last one, which has counted these "
                "gradients already; call step() once after each backward pass, or set "
                "sample_count = 0 if this worker has no batch for the step"
            )
        return True

    def _has_counted(self, gradients: Iterable[tuple[torch.Tensor | None, int]]) -> None:
        """Notes gradients that no step may count again."""
        self._scaled_back = []
        self._counted = [
            (None if grad is None else weakref.ref(grad), version) for grad, version in gradients
        ]
        self._has_run_backward = False

    def _ending(
        self, begun: OpenExchange[NamedArrays] | None, options: Mapping[str, Any]
    ) -> Callable[[], object]:
        """What ends a step, within the time that there is then."""

        def end() -> object:
            self._await_uploads()
            if begun is not None:
                return begun.finish(self.timeout_s)
            return self.parameter.exchange(**{**options, "timeout_s": self.timeout_s})

        return end

    def _end_step(
        self,
        begun: OpenExchange[NamedArrays] | None,
        options: Mapping[str, Any],
        lying: NamedArrays,
    ) -> None:
        """Makes the call that ends a step, and takes the weights; what fails is owed."""
        step, buffer = self.parameter.next_step, self._gradients.arrays
        gradient = {**buffer, **lying} if lying else buffer
        taken = self._gradient_versions()
        try:
            self._ending(begun, {**options, "gradient": gradient})()
        except (NonFiniteError, ArgumentError):  # nothing more has left
            if begun is not None and begun.has_left:
                self._has_counted(taken)
                begun.forget()
                self._owed = self._ending(begun, options)
                with contextlib.suppress(ShardwellError):  # which the next `step` raises
                    self._settle()
            raise
        except BaseException:
            if self.parameter.next_step == step:  # else it diverged, and is over
                for tensor_name, array in lying.items():  # which others may write to from now on
                    np.copyto(buffer[tensor_name], array)
                self._owed = self._ending(begun, options)
                self._failed = taken
            self._has_counted(taken)
            raise
        self._has_counted(taken)
        self._take_weights()

    def _settle(self) -> None:
        """Makes good for a step that failed, if one did."""
        if self._owed is not None:
            step, owed = self.parameter.next_step, self._owed
            try:
                owed()
            finally:
                if self.parameter.next_step != step:
                    self._owed, self._failed = None, []
            self._take_weights()

    def _gradient_versions(self) -> list[tuple[torch.Tensor | None, int]]:
        """The gradients that the model has, and how often they were written."""
        grads = [tensor.grad for tensor in self._tensors.values()]
        return [(grad, -1 if grad is None else grad._version) for grad in grads]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients.

        Raises:
            ArgumentError: a part of them had left, for a step that was not made: it counts in the
                next, which others wait for. Gradients that are for no step, such as those of
                another loss through the same model, are computed under `no_sync`.
        """
        super().zero_grad(set_to_none)
        self._has_counted(() if set_to_none else self._gradient_versions())
        self._copies.wait()  # which write to where `forget` writes
        begun, self._begun = self._begun, None
        self._announced.clear()
        self._is_late = False
        if self._watch is not None:
            self._watch.begin_anew()
        if begun is not None:
            begun.forget()
            if begun.has_left:
                self._owed, self._failed = self._ending(begun, {}), []
                raise ArgumentError(
                    "zero_grad() after a backward pass without a step: a part of its gradients has "
                    "left and counts; compute what is for no step under optimizer.no_sync(), or "
                    "pass overlap=False"
                )

    # Whether gradients may leave in backward.

    def _end_watch(self) -> None:
        """Decides, at the end of the first step, whether gradients leave in those that follow."""
        if self._watch is None or self._watch.is_empty:
            return
        gradients = [tensor.grad for tensor in self._tensors.values()]
        change = self._watch.change(gradients, self._exchange_options())
        self._watch = None
        if change is None:
            self._overlaps = True
        else:
            self._go_on_without_overlap(change)

    def _go_on_without_overlap(self, change: str) -> None:
        """From this step on, for good, if that is left to us."""
        if self._is_auto:
            self._overlaps = False
            _LOG.debug(
                "parameter %r: %s between backward and step, so gradients leave in step(), not "
                "while backward goes on; overlap=False does so from the start, and clip_norm= of "
                "the update rule clips on the shards",
                self.parameter.name,
                change,
            )

    def _take_back(self, change: str) -> bool:
        """Takes back all announcements of this step, if nothing of it may have left."""
        begun = self._begun
        if begun is not None and begun.has_left:
            return False
        self._copies.wait()  # which write to where `forget` writes, and may announce
        if begun is not None and begun.has_left:
            return False
        if begun is not None:
            begun.forget()
        self._begun = None
        self._announced.clear()
        self._is_late = True
        self._go_on_without_overlap(change)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Torch's, of the rates alone, and which training it is of: name, step, digest of weights.

        The update rule's arrays stay on the shards, in whose checkpoints they are; with
        `saves_values` they are in the state, too, by tensor, through a temporary directory.

        Raises:
            ArgumentError: some gradients of a step have left, which has not ended; or values are
                asked for in asynchronous mode, or where steps may close without this worker.
            ShardwellError: with `saves_values`, as `Client.save_checkpoint`.
        """
        self._check_between_steps("state_dict()")
        own = self._training_state()
        state: dict[str, Any] = {**super().state_dict(), KEY: own.as_dict()}
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
        self._check_between_steps("load_state_dict()")
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
        self._check_between_steps("push_weights()")
        weights = torch.empty(self._layout.size, dtype=torch.float32, device="cpu")
        for tensor, own in zip(self._layout, self._tensors.values(), strict=True):
            weights[tensor.offset : tensor.stop] = own.detach().reshape(-1)
        self._replace(PushedValues({"weights": weights.numpy()}))

    def _replace(self, values: PushedValues) -> None:
        """Puts values in place of the cluster's, and takes the weights."""
        old = self.parameter
        if self._meeting is None:
            self._meeting = Meeting(self.client, old.name, old.spec.worker_count)
        # Pushed values have the order of the parameter, which may be another version's.
        opened = partial(self._opened, order=list(self._tensors))
        self.parameter = replace(
            self.client, old, values, self._meeting, opened, timeout_s=self.timeout_s
        )
        self._failed, self._options, self._begun = [], {}, None
        self._announced.clear()
        self._is_late = False
        self._await_uploads()
        self.parameter.get_weights(out=self._weights.arrays, timeout_s=self.timeout_s)
        self._take_weights()

    def _check_all_meet(self, what: str) -> None:
        """Returns if the workers are known, so that all of them can meet.

        Raises:
            ArgumentError: they come and go.
        """
        if self.parameter.spec.members is not None:
            raise ArgumentError(
                f"{what} waits until all workers call it, and with members= these are not known: "
                "a worker that comes later would miss it; begin a training under another "
                "name= with these weights, or client.restore_checkpoint() before workers start"
            )

    def _check_tables(self) -> None:
        """Refuses tables in the model that would wait for a worker which has gone.

        Raises:
            ArgumentError: one has a fixed number of workers.
        """
        for module in self._tables:
            spec = module.table.spec
            if spec.mode == "sync" and spec.members is None:
                raise ArgumentError(
                    f"table {spec.name!r} of the model has {spec.crew} for good, and would wait "
                    "for one that has gone; with members= open it with members= or mode='async', "
                    "too"
                )

    def _check_between_steps(self, what: str) -> None:
        """Returns if no gradient has left that no step has counted; takes back what has not.

        Raises:
            ArgumentError: one has.
        """
        if self._owed is not None or (self._begun is not None and self._begun.has_left):
            raise ArgumentError(f"{what} in the middle of a step; call step() before")

    def _training_state(self) -> TrainingState:
        """The training state at the weights of the last step."""
        is_sync = self.parameter.spec.mode == "sync"
        return TrainingState(
            name=self.parameter.name,
            version=self.parameter.next_step if is_sync else self.parameter.version,
            digest=digest_of(zip(self._tensors, self._weights.views, strict=True)),
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
        before, self._is_paused = self._is_paused, True
        try:
            with contextlib.ExitStack() as layers:
                for module in self._tables:
                    layers.enter_context(module.no_sync())
                yield
        finally:
            self._is_paused = before

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
        self._leave.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._copies.close()

    # Gradients out.

    def _has_gradient(self, tensor: torch.Tensor) -> None:
        """Called by backward when a gradient is computed, on any of torch's threads."""
        self._has_run_backward = True
        self._backward.note(tensor)
        if self._is_paused or self._owed is not None:  # which `step` makes good for first
            return
        with torch.no_grad(), self._lock:
            if self._overlaps and not self._is_late:
                self._announce(tensor)
            elif self._watch is not None:
                self._watch.add(self._places[id(tensor)], tensor.grad, self._exchange_options)

    def _announce(self, tensor: torch.Tensor) -> None:
        """Copies a gradient, which may leave then."""
        place = self._places[id(tensor)]
        tensor_name = self._layout.tensors[place].name
        if place in self._announced:
            if self._take_back(f"gradients accumulate, such as of tensor {tensor_name!r},"):
                return
            raise ArgumentError(
                f"tensor {tensor_name!r} has a second gradient in one step, and the first has "
                "left; accumulate under optimizer.no_sync(), or pass overlap=False"
            )
        assert tensor.grad is not None
        begun, gradient = self._begin(), tensor.grad.detach()
        if gradient.layout != torch.strided:
            raise _sparse(tensor_name)
        where, view = self._layout.tensors[place], self._gradients.views[place]
        if self._copies.takes(gradient):
            self._copies.copy(view, gradient, partial(begun.ready, where.offset, where.stop))
        else:
            view.copy_(gradient)
            begun.ready(where.offset, where.stop)
        self._announced[place] = (tensor.grad, tensor.grad._version)

    def _begin(self) -> OpenExchange[NamedArrays]:
        """The exchange of this step, begun now if it is not."""
        if self._begun is None:
            self._check_model()
            self._follow_device()
            options = self._exchange_options()
            self._await_uploads()
            self._begun = self.parameter.begin_exchange(**options)
            self._options = options
        return self._begun

    def _exchange_options(self) -> dict[str, Any]:
        """How the gradient is exchanged; the same as when the exchange was begun.

        Raises:
            ArgumentError: it has changed since.
        """
        options = {
            "gradient": self._gradients.arrays,
            "sample_count": self.sample_count,
            "learning_rate": self._rates.rate(self.param_groups),
            "out": self._weights.arrays,
            "timeout_s": self.timeout_s,
        }
        for what in ("sample_count", "learning_rate"):
            if self._begun is not None and options[what] != self._options[what]:
                if self._take_back(f"{what} changes"):
                    break
                raise ArgumentError(
                    f"{what} was {self._options[what]} when gradients began to leave, and is "
                    f"{options[what]} now; set it before backward, or pass overlap=False"
                )
        return options

    def _copy_missing(self) -> NamedArrays:
        """Puts the gradients into the flat buffer that were not announced.

        But not large ones that can be sent from where they lie, if nothing has left: it returns
        these.
        """
        targets, sources = [], []
        lying: NamedArrays = {}
        for place, (tensor_name, tensor) in enumerate(self._tensors.items()):
            if place not in self._announced:
                if tensor.grad is None:
                    self._gradients.views[place].zero_()
                elif tensor.grad.layout != torch.strided:
                    raise _sparse(tensor_name)
                elif place in self._large and self._begun is None and is_sent_in_place(tensor.grad):
                    lying[tensor_name] = tensor.grad.detach().numpy()
                else:
                    targets.append(self._gradients.views[place])
                    sources.append(tensor.grad)
        if targets:
            copy_all(targets, sources, non_blocking=self._is_on_gpu)
            for event in self._recorded():
                event.synchronize()
        return lying

    def _follow_device(self) -> None:
        """Makes the buffers anew if the model was moved to a GPU or from it, between steps."""
        is_on_gpu = any(tensor.is_cuda for tensor in self._tensors.values())
        if is_on_gpu != self._is_on_gpu:
            self._await_uploads()
            before, self._is_on_gpu = self._weights, is_on_gpu
            self._gradients = FlatTensors(self._layout, is_pinned=is_on_gpu)
            self._weights = FlatTensors(self._layout, is_pinned=is_on_gpu)
            copy_all(self._weights.views, before.views)

    def _recorded(self) -> list[torch.cuda.Event]:
        """Events behind what the GPUs' current streams were given."""
        events = []
        for device in {tensor.device for tensor in self._tensors.values() if tensor.is_cuda}:
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events

    # Weights in.

    def _read_weights(self, timeout_s: float | None = None) -> None:
        """Puts the cluster's weights into the model, those that the next step begins with."""
        # Started again, it goes on from the step that it had ended, which may wait for the others.
        version = self.parameter.next_step if self.parameter.spec.mode == "sync" else 0
        self._await_uploads()
        self.parameter.get_weights(
            out=self._weights.arrays, min_version=version, timeout_s=timeout_s
        )
        self._take_weights()

    def _take_weights(self) -> None:
        tensors = list(self._tensors.values())
        copy_all(tensors, self._weights.views, non_blocking=self._is_on_gpu)
        self._uploads = self._recorded()
        self._versions = {id(tensor): tensor._version for tensor in tensors}

    def _await_uploads(self) -> None:
        """Blocks until GPUs have the weights, whose buffer may be written from then on."""
        for event in self._uploads:
            event.synchronize()
        self._uploads = []

    # Checks.

    def _check_model(self) -> None:
        """Refuses a model that is not the one that all agreed on, before anything is sent.

        Raises:
            ArgumentError: a parameter came, went or has another shape.
        """
        trained = set(self._tensors)
        for given_name, tensor in self._model.named_parameters():
            tensor_name = self._names(given_name)
            known = self._tensors.get(tensor_name)
            if known is None:
                if tensor.requires_grad and tensor_name not in self._left_out:
                    raise ArgumentError(
                        f"tensor {tensor_name!r} was added to the model, or unfrozen, after the "
                        "start; close() this ServerOptimizer, and make another, with another name"
                    )
                continue
            trained.discard(tensor_name)
            shape = self._layout.by_name[tensor_name].shape
            if tensor is known and tensor.shape == shape and self._has_other_weights(tensor):
                raise ArgumentError(
                    f"the weights of tensor {tensor_name!r} were changed by something else than "
                    f"step(), and the shards, at step {self.parameter.next_step}, do not have "
                    "them; to begin a new training with them call push_weights() on all workers; "
                    "close() this ServerOptimizer before another is made for the model"
                )
            if tensor is not known or tensor.shape != shape:
                raise ArgumentError(
                    f"tensor {tensor_name!r} of the model was replaced after the start: it has "
                    f"shape {tuple(tensor.shape)}, expected {shape}; close() this "
                    "ServerOptimizer, and make another, with another name"
                )
        if trained:
            raise ArgumentError(f"tensor {min(trained)!r} of the model is gone since the start")

    def _has_other_weights(self, tensor: torch.nn.Parameter) -> bool:
        """Whether a tensor has other weights than the last step put there; it may be idle."""
        if tensor._version == self._versions[id(tensor)]:
            return False
        view = self._weights.views[self._places[id(tensor)]]
        if not torch.equal(tensor.detach().cpu(), view.to(tensor.dtype)):
            return True
        self._versions[id(tensor)] = tensor._version  # they were loaded, and are the same
        return False

    def _check_announced(self) -> None:
        """Refuses gradients that were changed after they had left.

        Raises:
            ArgumentError: one was.
        """
        for place, (gradient, version) in self._announced.items():
            tensor = self._layout.tensors[place]
            now = self._tensors[tensor.name].grad
            if now is not gradient or now._version != version:
                if self._take_back(f"the gradient of tensor {tensor.name!r} changes"):
                    return
                raise ArgumentError(
                    f"gradient of tensor {tensor.name!r} was changed after backward, when it had "
                    "left already; clip with clip_norm= of the optimizer, or pass overlap=False"
                )

    @property
    def _tables(self) -> list[TableModule]:
        """The model's layers whose weight is a table."""
        return [module for module in self._model.modules() if isinstance(module, TableModule)]

    def _left_by_scaler(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What a GradScaler leaves to the optimizer: whether a gradient is not finite, its scale.

        None each: there is no scaler, or it has scaled back itself.

        Raises:
            ArgumentError: gradients have left, or were pushed to tables, as they were scaled.
        """
        found_inf = self.__dict__.pop("found_inf", None)
        scale = self.__dict__.pop("grad_scale", None)
        if found_inf is not None and not self._is_auto and self._overlaps:
            raise ArgumentError(
                "a GradScaler scales gradients back when they have left already; pass overlap=False"
            )
        if found_inf is not None and self._tables:
            raise ArgumentError(
                "a GradScaler does not scale back gradients of a table's rows, which backward "
                "pushes; train in bfloat16, which needs none"
            )
        return found_inf, scale

    def _scale_back(self, scale: torch.Tensor) -> None:
        """Divides gradients by a scaler's scale, where they lie, once."""
        now = self._gradient_versions()
        pairs = zip(self._scaled_back, now, strict=False)
        if self._scaled_back and all(a[0] is b[0] and a[1] == b[1] for a, b in pairs):
            return  # and the step failed before it began
        inverse = scale.double().reciprocal().float()
        for tensor in self._tensors.values():
            if tensor.grad is not None:
                tensor.grad.mul_(inverse.to(tensor.grad.device))
        self._scaled_back = self._gradient_versions()


def _sparse(tensor_name: str) -> ArgumentError:
    return ArgumentError(
        f"gradients of tensor {tensor_name!r} are sparse; dense ones are expected; make its layer "
        "with sparse=False, or train it as a table"
    )


def _opened(
    client: Client,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    order: Sequence[str] | None = None,
    **options: Any,
) -> Parameter[NamedArrays]:
    """The parameter of a model: in the order that it has, or, if it is new, as gradients come.

    With `order`, a new one has that.
    """
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
    parameter = client.parameter(name, tensors={key: shapes[key] for key in order}, **options)
    parameter.advise_on_non_finite(
        "zero_grad() and go on with another batch, lower the learning rate, or clip with "
        "clip_norm= of the optimizer"
    )
    return parameter
