"""Gradients that are averaged before each step of an optimizer, which stays the user's.

Hooks of the optimizer do it, as those of DiLoCo count its steps. What travels is one vector:

    gradients of all tensors | per tensor: whether it has one | not finite | loss of a closure

Invariant: all workers get the same vector, so all decide the same: which tensors have a gradient,
whether the step is skipped, and what a closure returned. An optimizer that is deterministic makes
the same step on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from shardwell.client import Client
from shardwell.errors import ArgumentError, NonFiniteError
from shardwell.group.group import Group
from shardwell.numerics.arguments import check_integer
from shardwell.numerics.codec import Float32
from shardwell.numerics.update_rules import clip
from shardwell.parameter.parameter import Parameter
from shardwell.process.connected import Connected
from shardwell.specs.checks import check_number
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import BLOCK_SIZES, SAMPLE_COUNT_MAX, CodecName
from shardwell.torch.buffers import check_tensor, copy_all
from shardwell.torch.gradient_watch import BackwardWatch
from shardwell.torch.mistakes import described, torch_optimizer
from shardwell.torch.trained_model import close_earlier, scale_back
from shardwell.training.gradient_sync import GradientSync, GroupSync, ServerSync

_EXTRA_COUNT = 2
"""Elements behind the flags: whether a gradient is not finite, and the loss."""


def mean_gradients(
    optimizer: torch.optim.Optimizer,
    through: Group | Client | Parameter[Any] | GradientSync,
    *,
    name: str = "gradients",
    worker_count: int = 1,
    codec: CodecName = "fp16",
    clip_norm: float = 0.0,
    timeout_s: float | None = None,
) -> MeanGradients:
    """Makes any torch optimizer step with the mean of all workers' gradients.

        group = shardwell.join_group()
        shardwell.torch.broadcast_state(model, group)
        means = shardwell.torch.mean_gradients(optimizer, group)
        for inputs, targets in batches:
            loss_fn(model(inputs), targets).backward()
            optimizer.step()  # averages first
            optimizer.zero_grad()

    The optimizer, its state and its schedulers stay on each worker. Backward passes accumulate as
    ever: gradients are averaged once, in `step`. `clip_norm=1.0` clips their mean; to change it in
    another way, average before:

        means.synchronize()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()

    With a GradScaler, a gradient that is not finite on one worker skips the step on all. `step`
    with a closure, as of LBFGS, averages after each evaluation, the loss as well.

    Args:
        optimizer: Any of torch's, or one that has its hooks.
        through: Made by `shardwell.join_group`: an all-reduce. Or by `shardwell.connect`: the
            shards average, in a parameter that is made for it. Or such a parameter, or any
            `GradientSync`. It stays the caller's to close.
        name: Name of the parameter that a client makes.
        worker_count: Its workers.
        codec: How its gradients travel.
        clip_norm: Norm down to which the mean over all of the optimizer's tensors is scaled, as by
            torch's clip_grad_norm_. 0 (default): no clipping.
        timeout_s: Bound of each call; default: that of the group or client.

    Returns:
        What averages: `synchronize`, `sample_count`, `close`.

    Raises:
        ArgumentError: the optimizer, or what is passed to average through, can't be used.
        SpecMismatchError: the cluster has another parameter under that name.
        ShardwellError: as `Client.parameter`.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.Adadelta(model.parameters())  # any
        >>> means = shardwell.torch.mean_gradients(optimizer, group)
        >>> model(torch.ones(4, 3)).square().mean().backward()
        >>> loss = optimizer.step()  # with the mean of all workers' gradients
        >>> means.close()
    """
    return MeanGradients(
        optimizer,
        lambda size: _sync_of(
            through,
            size,
            timeout_s,
            {"name": name, "worker_count": worker_count, "codec": codec},
        ),
        clip_norm,
    )


class MeanGradients(Connected):
    """A context manager that `mean_gradients` makes; its end takes the hooks off the optimizer.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with shardwell.torch.mean_gradients(optimizer, group) as means:
        ...     model(torch.ones(4, 3)).square().mean().backward()
        ...     means.synchronize()  # averages now, to clip the mean
        ...     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ...     loss = optimizer.step()
    """

    _elsewhere = "call mean_gradients in the other process, with a group or client of its own"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sync_of: Callable[[int], GradientSync],
        clip_norm: float = 0.0,
    ) -> None:
        optimizer = torch_optimizer("optimizer", optimizer)
        self.optimizer = optimizer
        """The user's."""
        self.sample_count = 1
        """Weight of this worker's next gradients in the mean, such as the number of samples."""
        check_number("clip_norm", clip_norm)
        self._clip_norm = clip_norm
        self._tensors = _trained(optimizer)
        self._flat = _zeros(self._tensors)
        self.sync = sync_of(self._flat.numel())
        """The object that averages."""
        self._is_synchronized = False
        """True if the gradients are means already."""
        self._non_finite = False
        """True if they were not, because one worker's were not finite."""
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {})
        close_earlier(list(hooks.values()), MeanGradients, MeanGradients.close)
        self._backward = BackwardWatch(self._tensors)
        self._is_native = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        # A GradScaler then calls `step` always, and leaves scaling back to it: a step that it skips
        # alone would be waited for by other workers.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def __repr__(self) -> str:
        return f"MeanGradients({type(self.optimizer).__name__}, {self.sync!r})"

    def synchronize(self) -> None:
        """Makes the gradients the mean of all workers'; blocks until it has come.

        All workers call it, or none; the next `step` does not average again then. A tensor without
        a gradient counts as zeros where another worker has one, and has none where none has.

        Raises:
            ArgumentError: a gradient is sparse, or an option can't be.
            ShardwellError: as `Group.all_reduce` or `Parameter.exchange`; the gradients are as they
                were.
        """
        self._average(None)
        self._is_synchronized = True

    def close(self) -> None:
        """Takes the hooks off the optimizer, which steps with its own gradients from then on."""
        self._backward.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.optimizer._step_supports_amp_scaling = self._is_native  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    # Hooks of the optimizer.

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = _closure(optimizer, args, kwargs)
        if closure is not None:
            return (optimizer,), {**kwargs, "closure": self._averaged(closure)}
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None and self._backward.makes_state(optimizer):
            return None  # the others make none
        scale = getattr(optimizer, "grad_scale", None)
        if not self._is_synchronized:
            if scale is not None:
                scale_back(self._tensors, scale)
            self._average(None)
        if found_inf is not None:
            optimizer.grad_scale = optimizer.found_inf = None  # both are settled, for all workers
        elif self._non_finite:
            self._is_synchronized = False
            self._refuse()
        return None

    def _after(self, *_: Any) -> None:
        self._is_synchronized = False

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            loss = closure()
            plain = loss.detach() if isinstance(loss, torch.Tensor) else loss
            mean = self._average(0.0 if plain is None else float(plain))
            if self._non_finite:
                self._refuse()
            if isinstance(plain, torch.Tensor):
                return torch.full_like(plain, mean)
            return None if plain is None else mean

        return averaged

    def _refuse(self) -> None:
        raise NonFiniteError(
            "a worker's gradient is NaN or infinite, and no step was made; all workers get this "
            "error: zero_grad() and go on with another batch, or lower the learning rate"
        )

    # The mean.

    @torch.no_grad()
    def _average(self, loss: float | None) -> float:
        count = check_integer("sample_count", self.sample_count, 0, SAMPLE_COUNT_MAX)
        tensors = _trained(self.optimizer)
        if [id(tensor) for tensor in tensors] != [id(tensor) for tensor in self._tensors]:
            self._tensors, self._flat = tensors, _zeros(tensors)  # a group was added
            self._backward.close()
            self._backward = BackwardWatch(tensors, self._backward.loader)
        flat = self._flat
        flat.zero_()
        places = _places(flat, tensors)
        flags = flat[flat.numel() - len(tensors) - _EXTRA_COUNT :]
        own = [place for place, tensor in enumerate(tensors) if tensor.grad is not None]
        for place in own:
            gradient = tensors[place].grad
            if gradient is not None and gradient.layout != torch.strided:
                raise ArgumentError(
                    f"the gradient of tensor {place} of the optimizer, of shape "
                    f"{tuple(gradient.shape)}, is sparse; dense ones are expected: make its layer "
                    "with sparse=False"
                )
        if own:
            copy_all([places[place] for place in own], [tensors[place].grad for place in own])
        # As large as the gradients, beside which a codec of few bits would round 1 up or them down.
        flags[own] = float(flat.abs().max()) or 1.0
        flags[-1] = 0.0 if loss is None else loss
        batches = self._backward.batches
        if not math.isfinite(float(flat.sum())) and not bool(flat.isfinite().all()):
            flat.zero_()
            flags[-_EXTRA_COUNT] = 1.0
            batches = ()
        array: Float32 = flat.numpy()
        if isinstance(self.sync, ServerSync):
            self.sync.sync_gradients(array, sample_count=count, batch=batches)
            self._backward.note_given(batches)
            self._backward.give_back()
        else:
            self.sync.sync_gradients(array, sample_count=count)
        self._non_finite = bool(flags[-_EXTRA_COUNT] > 0)
        if self._clip_norm and not self._non_finite:
            clip(array[: -flags.numel()], self._clip_norm)
        for tensor, place, flag in zip(tensors, places, flags.tolist(), strict=False):
            if self._non_finite or flag <= 0:
                tensor.grad = None
            elif tensor.grad is None:
                tensor.grad = place.to(tensor.device, tensor.dtype, copy=True)
            else:
                tensor.grad.copy_(place)
        return float(flags[-1])


def _closure(optimizer: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """The closure passed to `step`; torch's hooks get it with the optimizer ahead or without."""
    given = [each for each in args if each is not optimizer]
    found: Callable[[], Any] | None = kwargs.get("closure", given[0] if given else None)
    return found


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [t for group in optimizer.param_groups for t in group["params"] if t.requires_grad]
    if not found:
        raise ArgumentError("the optimizer has no tensor that requires a gradient")
    for place, tensor in enumerate(found):
        check_tensor(f"{place} of the optimizer", tensor)
    return found


def _zeros(tensors: list[torch.Tensor]) -> torch.Tensor:
    size = sum(tensor.numel() for tensor in tensors) + len(tensors) + _EXTRA_COUNT
    return torch.zeros(size, dtype=torch.float32, device="cpu")


def _places(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    stops = np.cumsum([tensor.numel() for tensor in tensors]).tolist()
    return [
        flat[stop - tensor.numel() : stop].view(tensor.shape)
        for stop, tensor in zip(stops, tensors, strict=True)
    ]


def _sync_of(
    through: Any, size: int, timeout_s: float | None, options: dict[str, Any]
) -> GradientSync:
    if isinstance(through, Group):
        return GroupSync(through, timeout_s)
    if isinstance(through, Client):
        through = through.parameter(size=size, optimizer=Average(), **options)
    if isinstance(through, Parameter):
        if through.size != size:
            raise ArgumentError(
                f"parameter {through.name!r} has {through.size} elements, and {size} are "
                "exchanged: those of the gradients, one a tensor, and two more; pass the client, "
                "and mean_gradients opens one",
                parameter=through.name,
            )
        if through.spec.codec in BLOCK_SIZES:
            raise ArgumentError(
                f"parameter {through.name!r} has codec {through.spec.codec}, which rounds away "
                "what workers say beside their gradients; open one with fp16",
                parameter=through.name,
            )
        return ServerSync(through, timeout_s)
    if isinstance(through, GradientSync):
        return through
    raise ArgumentError(
        "mean_gradients needs a group (shardwell.join_group), a client (shardwell.connect), a "
        f"parameter or a GradientSync; got {described(through)}"
    )
