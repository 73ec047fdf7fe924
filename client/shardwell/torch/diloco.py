"""Outer training of a torch model: hooks of its optimizer count inner steps.

`shardwell.Outer` decides what is sent and taken, and when. Here the model's tensors become its
local weights, on the CPU and float32, when it asks for them, and what it returns is put into the
model.

Invariant: between two inner steps nothing but what is here writes to the trained tensors; else
their change would be sent as if it had been trained.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from typing_extensions import override

from shardwell.checkpoint.format import Checkpoint
from shardwell.client import Client
from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import check_integer
from shardwell.outer.outer import DEFAULT_CODEC, DEFAULT_OUTER, Outer, OverdueName
from shardwell.parameter.values import NamedArrays
from shardwell.placement.fragments import STRIDED, Patterns
from shardwell.process.connected import Connected
from shardwell.specs.members import Elastic
from shardwell.specs.optimizers import Optimizer
from shardwell.specs.parameter import CodecName
from shardwell.specs.samples import Samples
from shardwell.torch.buffers import check_tensor
from shardwell.torch.gradient_watch import BackwardWatch
from shardwell.torch.loop.kept_objects import TensorForm, objects_of, schedules_of
from shardwell.torch.loop.prepare import resume_training
from shardwell.torch.loop.shares import SharedBatches, SharedLoader, batch_count, samples_of
from shardwell.torch.mistakes import check_call, check_model, torch_optimizer
from shardwell.torch.optimizer import save_open
from shardwell.torch.plain_names import PlainNames
from shardwell.torch.trained_model import TrainedModel, close_earlier

_LOG = logging.getLogger("shardwell")
_CALL = "shardwell.torch.DiLoCo(model, inner_optimizer, client, worker_count=4)"
_EXACT = (torch.float32, torch.float64)
"""Types whose tensors hold a float32 as it is."""


class DiLoCo(Connected):
    """Trains a model by its own optimizer, and exchanges what moved every `sync_every` steps.

        with shardwell.torch.DiLoCo(model, optimizer, client, worker_count=4):
            for inputs, targets in batches:
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

    The loop stays as it is: any optimizer, schedulers, autocast, accumulation, a GradScaler. The
    model gets the first learner's weights, or those that the cluster has already. Buffers, such as
    BatchNorm's statistics, stay each learner's own, and so do frozen parameters, which all learners
    are to have alike. A GradScaler's skipped step is no inner step.

    SIGTERM ends the inner step under way, and then the program: see `is_leaving`.

    Args:
        model: Its parameters that require gradients are trained, under their names. They may be on
            any device, float32, float64, float16 or bfloat16; shards have float32.
        inner_optimizer: The model's optimizer; or several, in the order in which they step: an
            inner step ends with the last.
        client: Made by `shardwell.connect`. It stays the caller's to close.
        name: Name of the family on the cluster.
        outer: See `shardwell.Outer`, as all that follow.
        sync_every: Inner steps between two outer steps of a fragment.
        fragments: How many, or patterns.
        assignment: How layers are dealt into them.
        overlap: Inner steps that go on while a fragment travels.
        alpha: The part of the local weights that stays at a take.
        codec: How fragments travel.
        worker_count: Learners that make an outer step; default: 1.
        members: In place of worker_count: learners come and go.
        min_contributors: See `Client.parameter`.
        grace_s: See `Client.parameter`.
        overdue: What happens when a result has not come in time.
        samples_per_step: What an inner step is trained on, as weights of learners' offers; `DiLoCo.
            sample_count` may be set before each step instead.
        watches_model: Whether weights that something else than the optimizer has written to are an
            error. False: for a model whose weights are written on purpose, as by
            Embedding(max_norm=...), or clamped after each step; what that moves is trained, then.
        loader: A plain DataLoader, as of `prepare`; the shards deal `DiLoCo.loader`, so that each
            sample counts once an epoch, on all learners, with the offers. Offers weigh by its
            samples. A learner that is started again is dealt what its last offer had not.
        seed: See `prepare`.
        schedule: A scheduler of torch's, or a list of them. The shards keep its state with each
            offer, and so they do of the rates, the statistics of BatchNorm, and all that the next
            two have: a learner that is started again has those of its last offer. See
            `Outer.keep_state`.
        scaler: A `torch.amp.GradScaler`.
        state: More objects by name, see `prepare`; 64,000,000 bytes at most in all. The inner
            optimizer may be one where its state is so small; it is not kept by itself.
        resume: A checkpoint, see `prepare`.
        leave_on_sigterm: Whether SIGTERM, where the program has no handler of it, lets the step
            under way end, and then the program. Default: where the others go on without this
            learner.
        timeout_s: How long a take waits; default: the client's.

    Raises:
        SpecMismatchError: the cluster has another family under that name.
        ArgumentError: a tensor, the optimizer or an option can't be; names it.
        ShardwellError: as `Client.parameter`.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with shardwell.torch.DiLoCo(
        ...     model, inner, client, name="diloco", sync_every=2, fragments=1, overlap=0
        ... ) as training:
        ...     while training.next_step < 2:
        ...         model(torch.ones(4, 3)).square().mean().backward()
        ...         inner.step()
        ...         inner.zero_grad()
    """

    _elsewhere = "make a DiLoCo in the other process, with a client that is connected there"

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuses arguments that it does not take, by name."""
        check_call(cls, _CALL, args, options)
        return super().__new__(cls)

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        client: Client,
        *,
        name: str = "model",
        outer: Optimizer = DEFAULT_OUTER,
        sync_every: int = 100,
        fragments: int | Patterns = 4,
        assignment: str = STRIDED,
        overlap: int = 2,
        alpha: float = 0.0,
        codec: CodecName = DEFAULT_CODEC,
        worker_count: int | None = None,
        members: Elastic | None = None,
        min_contributors: int = 0,
        grace_s: float = 0.0,
        overdue: OverdueName = "wait",
        samples_per_step: int = 1,
        watches_model: bool = True,
        loader: Any = None,
        seed: int = 0,
        schedule: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        resume: str | os.PathLike[str] | None = None,
        leave_on_sigterm: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        check_model(model, _CALL)
        check_integer("seed", seed, 0, 2**32 - 1)
        whole = loader.whole if isinstance(loader, SharedLoader) else loader
        samples = None if whole is None else samples_of(whole, seed)
        self.sample_count = samples_per_step
        """Samples of the next inner step; stays until it is set again."""
        self._watches_model = watches_model
        self._zeroing: tuple[torch.optim.Optimizer, Callable[..., None]] | None = None
        names = PlainNames(model)
        tensors = _trained(names.of(model.named_parameters()))
        self._model = TrainedModel(model, names, tensors, "DiLoCo")
        self._optimizers = _optimizers(inner_optimizer, tensors)
        self._local = _LocalWeights(tensors)
        schedules = schedules_of(schedule)
        self._client = client
        if resume is not None:
            resume_training(client, resume, name, None if members else worker_count or 1)
        self.outer = Outer(
            client,
            name,
            tensors=self._model.shapes,
            outer=outer,
            sync_every=sync_every,
            fragments=fragments,
            assignment=assignment,
            overlap=overlap,
            alpha=alpha,
            codec=codec,
            worker_count=worker_count,
            members=members,
            min_contributors=min_contributors,
            grace_s=grace_s,
            overdue=overdue,
            timeout_s=timeout_s,
        )
        """Where outer training is: `fragments`, `image`, `inner_step`, `waited_s`, `hidden_s`."""
        self._local.update(self.outer.init(self._local))
        self._close_earlier()
        self._backward = BackwardWatch(tensors.values())
        self.loader: SharedLoader | None = None
        """This learner's share of the data; None: no loader was given."""
        if samples is not None:
            self.loader = SharedLoader(whole, self._fed(samples))
        kept = objects_of(
            model, self._optimizers, schedules, scaler, {} if state is None else state
        )
        self._keeps_state = bool(kept)
        if kept:
            self.outer.keep_state(kept, forms=[TensorForm()])
        hooks: list[Any] = []
        for optimizer in self._optimizers:
            hooks.append(optimizer.register_step_pre_hook(self._before))
            hooks.append(optimizer.register_step_post_hook(self._after))
        self._model.attach(hooks, self.outer.spec, leave_on_sigterm)

    def __repr__(self) -> str:
        return f"DiLoCo({self.outer.name!r}, inner step {self.inner_step})"

    @property
    def inner_step(self) -> int:
        """The inner steps that this learner has made."""
        return self.outer.inner_step

    @property
    def next_step(self) -> int:
        """The outer step to go on with, also after a restart; see `Outer.next_step`."""
        return self.outer.next_step

    @property
    def is_leaving(self) -> bool:
        """True if SIGTERM has come, or an operator drains this learner (`shardwell members drain`).

        A loop that looks here ends by itself then; any other is ended by its next inner step, which
        raises SystemExit(143) once it is made. A second SIGTERM ends the process at once.
        """
        return self._model.is_leaving

    def reload(self) -> None:
        """Puts the cluster's newest weights into the model, and forgets what it has moved since.

        Such as after weights that became NaN, or that something else wrote to. The inner optimizer
        keeps its state.

        Raises:
            ShardwellError: as `Outer.reload`.
        """
        self._local.update(self.outer.reload())
        self._local.note()

    def state_dict(self) -> dict[str, Any]:
        """The state that a learner goes on with after a restart, beside model and inner optimizer.

        Inner steps; of each fragment the samples since it was taken, what the learner has moved
        since, and what rounding has left to send. Tensors and plain numbers: `torch.load` reads it
        with weights_only=True. The outer optimizer's state is on the shards.
        """
        state: dict[str, Any] = _converted(
            self.outer.state_dict(self._local), np.ndarray, torch.from_numpy
        )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state: the cluster's newest weights, and what the learner had moved.

        Call it before the first inner step. The cluster may have gone on since.

        Raises:
            ArgumentError: the state is of another family or model, or damaged; names what differs.
        """
        state = _converted(state_dict, torch.Tensor, lambda each: each.detach().cpu().numpy())
        self._local.update(self.outer.load_state_dict(state))

    def close(self) -> None:
        """Takes the hooks off the optimizer, and ends open offers. The client stays open."""
        self._unhook()
        self.outer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._unhook()
        self.outer.__exit__(*reason)

    def save(self, path: str | os.PathLike[str], *, keep: int | None = None) -> Checkpoint:
        """Saves all that the client has open: what `resume=` goes on with, on other shards.

        That is each fragment with the outer optimizer's state, the account of samples, what is kept
        of each learner, and whatever else the client trains. What learners have moved since their
        last offers, and the states of their inner optimizers, are not in it. One learner calls it,
        between two inner steps.

        Args:
            path: See `Client.save_checkpoint`.
            keep: See there.

        Raises:
            ShardwellError: as `Client.save_checkpoint`.
        """
        return save_open(self._client, path, [self.outer.name], [self._model.model], keep=keep)

    # The loader.

    def _fed(self, samples: Samples) -> SharedBatches:
        spec = self.outer.spec
        is_fixed = spec.members is None
        members = spec.members
        worker_count = spec.worker_count if members is None else members.reference_count or 1
        dealer = _Dealer(self)
        batches = SharedBatches(
            samples,
            lambda: dealer,
            functools.partial(batch_count, samples, worker_count, is_fixed),
            is_counted=True,
            take_last=dealer.reload,
        )
        batches.before_step = dealer.begin_step
        self._backward.feed(batches)
        self._watch_zero_grad(self._optimizers[0])
        return batches

    def _watch_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives batches back whose gradient is thrown away, as of a step that a scaler skipped."""
        zero_grad, backward = optimizer.zero_grad, self._backward

        def zero(*arguments: Any, **options: Any) -> None:
            backward.give_back()
            zero_grad(*arguments, **options)

        optimizer.zero_grad = zero  # type: ignore[method-assign]
        self._zeroing = optimizer, zero

    # Hooks of the optimizers.

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is self._optimizers[0]:
            self._check_untouched()
            if self._keeps_state:
                self.outer.note_state()

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._backward.makes_state(optimizer):
            self._local.note()  # torch has written to the tensors, which are as they were
            return
        if optimizer is not self._optimizers[-1]:
            return
        with self._model.step(lambda: self.outer.is_draining):
            self._local.note()  # what happens next may fail
            if self.outer.is_offer_due:
                self._model.check()
            batches = self._backward.batches
            self._backward.note_given(batches)
            count = sum(map(len, batches)) if batches else self.sample_count
            self.outer.after_step(self._local, count, batch=batches, into=self._local)

    def _check_untouched(self) -> None:
        for name, tensor in self._model.tensors.items():
            version, address, shape = self._local.seen[name]
            if tensor.shape != shape:
                raise ArgumentError(
                    f"tensor {name!r} of the model has shape {tuple(tensor.shape)}, and had "
                    f"{tuple(shape)} before; close() this DiLoCo, and make another, with another "
                    "name"
                )
            if not self._watches_model:
                continue
            if tensor._version != version or tensor.data_ptr() != address:
                what = "moved to other memory" if tensor.data_ptr() != address else "written to"
                raise ArgumentError(
                    f"tensor {name!r} of the model was {what} by something else than the inner "
                    f"optimizer, after inner step {self.inner_step}; that would be sent as if it "
                    "had been trained; call reload(), which puts the cluster's weights into the "
                    "model, and load or move a model before its DiLoCo is made; or pass "
                    "watches_model=False, if training writes to it on purpose"
                )

    def _close_earlier(self) -> None:
        """Closes a DiLoCo of the same optimizer, as after a notebook's cell ran twice."""

        def close(owner: DiLoCo) -> None:
            owner._unhook()
            owner.outer.give_back()
            if owner.outer.name != self.outer.name:  # else its parameters are the same objects
                owner.outer.close()
            _LOG.warning(
                "the DiLoCo of %r was closed: another one, of %r, trains with the same optimizer "
                "from now on",
                owner.outer.name,
                self.outer.name,
            )

        hooks = [getattr(each, "_optimizer_step_post_hooks", {}) for each in self._optimizers]
        close_earlier((hook for of in hooks for hook in of.values()), DiLoCo, close)

    def _unhook(self) -> None:
        self._model.close()
        self._backward.close()
        if self._zeroing is not None:
            optimizer, zero = self._zeroing
            if vars(optimizer).get("zero_grad") is zero:
                del optimizer.zero_grad
            self._zeroing = None


class _Dealer:
    """A dealer of the loader's batches: the family, whose last offers end the data."""

    def __init__(self, training: DiLoCo) -> None:
        self._outer = training.outer
        self.next_batch, self.put_back = self._outer.next_batch, self._outer.put_back
        self.give_back = self._outer.give_back
        self._local, self._backward = training._local, training._backward
        self._reload = weakref.WeakMethod(training.reload)

    @property
    def samples_done(self) -> int:
        return self._outer.samples_done

    def begin_step(self, has_made_steps: bool) -> None:
        self._outer.note_state()

    def await_free(self, samples: Samples, limit: int) -> bool:
        self._backward.give_back()
        return self._outer.await_free(samples, limit, weights=self._local)

    def reload(self) -> None:
        reload = self._reload()
        if reload is not None:
            reload()


class _LocalWeights(MutableMapping[str, Any]):
    """A model's tensors as float32 arrays on the CPU, made when they are asked for.

    The rest that a narrower type rounds off is added again, so that it is not taken for trained.
    """

    def __init__(self, tensors: Mapping[str, torch.nn.Parameter]) -> None:
        self._tensors = tensors
        self._rounded_off: NamedArrays = {}
        self.seen: dict[str, tuple[int, int, torch.Size]] = {}
        """The version by torch's count, address and shape of each tensor as it should be."""
        self.note()

    def note(self) -> None:
        for name, tensor in self._tensors.items():
            self.seen[name] = tensor._version, tensor.data_ptr(), tensor.shape

    @override
    def __getitem__(self, name: str) -> Any:
        array = self._tensors[name].detach().to("cpu", torch.float32).numpy()
        rounded_off = self._rounded_off.get(name)
        return array if rounded_off is None else array + rounded_off

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @override
    def __len__(self) -> int:
        return len(self._tensors)

    @override
    @torch.no_grad()
    def __setitem__(self, name: str, array: Any) -> None:
        tensor = self._tensors[name]
        tensor.copy_(torch.from_numpy(array))
        if tensor.dtype not in _EXACT:
            written = tensor.detach().to("cpu", torch.float32).numpy()
            self._rounded_off[name] = np.subtract(array, written)
        self.seen[name] = tensor._version, tensor.data_ptr(), tensor.shape

    @override
    def __delitem__(self, name: str) -> None:
        raise TypeError(f"tensor {name!r} is the model's")


def _trained(named: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    found = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
    if not found:
        raise ArgumentError("the model has no parameter that requires a gradient")
    for name, tensor in found.items():
        check_tensor(name, tensor)
    return found


def _optimizers(
    given: Any, tensors: Mapping[str, torch.nn.Parameter]
) -> list[torch.optim.Optimizer]:
    listed = list(given) if isinstance(given, list | tuple) else [given]
    ids = {id(tensor) for tensor in tensors.values()}
    found = []
    for each in listed:
        inner = torch_optimizer("inner_optimizer", each)
        trained = {id(tensor) for group in inner.param_groups for tensor in group["params"]}
        if not trained & ids:
            raise ArgumentError(
                f"inner_optimizer {type(inner).__name__} has no parameter of the model that "
                "requires a gradient; make it with model.parameters() of this model"
            )
        found.append(inner)
    if not found:
        raise ArgumentError("inner_optimizer must be one optimizer of torch at least; got none")
    return found


def _converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, Mapping):
        return {key: _converted(each, kind, convert) for key, each in value.items()}
    return [_converted(each, kind, convert) for each in value] if isinstance(value, list) else value
