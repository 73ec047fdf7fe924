"""The optimizers: value objects, checked when made. Their arithmetic is in `update_rules`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from shardwell.errors import ArgumentError
from shardwell.specs.checks import check_number
from shardwell.specs.wire_form import Alternative
from shardwell.v1 import types_pb2

_NOT_GIVEN: Any = None
"""A learning rate that is looked for under its other name."""


def check_learning_rate(what: str, value: float, optimizer: Optimizer | None = None) -> float:
    """Returns `value` if it can be a learning rate: finite and at least 0, with FTRL above 0."""
    check_number(what, value)
    if isinstance(optimizer, FTRL) and value == 0:
        raise ArgumentError(f"{what} must be above 0 with FTRL, which divides by it; got {value!r}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class Optimizer(Alternative[types_pb2.Optimizer]):
    """The base of all update rules, which run on the shards, per chunk, in float32.

    Examples:
        >>> optimizer = shardwell.Adam(lr=1e-3, clip_value=1.0)  # one of its kinds
        >>> isinstance(optimizer, shardwell.Optimizer)
        True
    """

    lr: dataclasses.InitVar[float | None] = None
    """`learning_rate` under torch's name, to make one with: `SGD(lr=0.1)`."""
    clip_value: float = 0.0
    """Elements of the mean gradient are clipped to [-clip_value, clip_value] first. 0 (default):
    no clipping."""
    clip_norm: float = 0.0
    """The mean gradient is scaled down to this L2 norm, over the whole parameter except frozen
    tensors, as torch's clip_grad_norm_ does; before clip_value. 0 (default): no clipping. With
    several workers a step takes two round trips more. Not of tables."""

    MESSAGE: ClassVar[Any] = types_pb2.Optimizer
    ONEOF: ClassVar[str] = "rule"
    SHARED: ClassVar[tuple[str, ...]] = ("clip_value", "clip_norm")
    _slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self, lr: float | None) -> None:
        self._name_rate(lr)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("bool", bool):
                if not isinstance(value, bool):
                    raise ArgumentError(f"{self._name(field.name)} must be a bool; got {value!r}")
            else:
                below = 1.0 if field.name in _IN_UNIT_INTERVAL else math.inf
                check_number(self._name(field.name), value, below=below)
        if getattr(self, "epsilon", 1.0) == 0.0:
            raise ArgumentError(f"{self._name('epsilon')} must be above 0; got 0.0")

    def _name_rate(self, lr: float | None) -> None:
        """Takes the rate from one of its two names."""
        rates = [field for field in dataclasses.fields(self) if field.name == "learning_rate"]
        kind = type(self).__name__
        if not rates:
            if lr is not None:
                raise ArgumentError(f"{kind} has no learning rate; got lr={lr!r}")
            return
        given = getattr(self, "learning_rate", None)
        if lr is not None:
            if given != rates[0].default and given != lr:
                raise ArgumentError(
                    f"{kind} got learning_rate={given!r} and lr={lr!r}, two names of one; pass one"
                )
            object.__setattr__(self, "learning_rate", lr)
        elif given is None:
            raise ArgumentError(
                f"{kind}.learning_rate must be a finite number at least 0, as {kind}(0.1); got none"
            )

    def _name(self, field: str) -> str:
        return f"{type(self).__name__}.{field}"

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The arrays of state, in the order of the shards', named as torch.optim names them."""
        has_momentum = getattr(self, "momentum", 0.0) > 0.0
        return (*self._slots, "momentum_buffer") if has_momentum else self._slots


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(Optimizer):
    """The Adagrad with one sum of squares a row, as DLRM and TorchRec have it. Of tables only.

    Examples:
        >>> rule = shardwell.RowWiseAdagrad(lr=0.05)
        >>> users = client.table("by_rows", row_count=None, dim=64, optimizer=rule)
    """

    learning_rate: float = dataclasses.field(default=_NOT_GIVEN, kw_only=False)
    """Step length, at least 0."""
    epsilon: float = 1e-10
    """Added to the denominator."""
    initial_accumulator: float = 0.0
    """Where the sums of mean squares start."""
    weight_decay: float = 0.0
    """L2 factor."""

    field_name: ClassVar[str] = "row_wise_adagrad"
    _slots: ClassVar[tuple[str, ...]] = ("row_sum",)


@dataclass(frozen=True, kw_only=True)
class FTRL(Optimizer):
    """The FTRL-Proximal rule (McMahan et al., 2013): sparse weights by L1. Of tables only.

    Examples:
        >>> rule = shardwell.FTRL(lr=0.1, l1=1e-3)
        >>> weights = client.table("by_ftrl", row_count=None, dim=1, optimizer=rule)
    """

    learning_rate: float = dataclasses.field(default=_NOT_GIVEN, kw_only=False)
    """Step length (the paper's alpha), above 0."""
    beta: float = 1.0
    """Smooths the first steps; the paper's choice."""
    l1: float = 0.0
    """Elements whose |z| is not above it are 0."""
    l2: float = 0.0
    """L2 factor."""

    field_name: ClassVar[str] = "ftrl"
    _slots: ClassVar[tuple[str, ...]] = ("z", "n")

    @override
    def __post_init__(self, lr: float | None) -> None:
        super().__post_init__(lr)
        check_learning_rate("FTRL.learning_rate", self.learning_rate, self)


OF_TABLES = (RowWiseAdagrad, FTRL)
"""The optimizers of rows alone, which parameters refuse."""

_IN_UNIT_INTERVAL = frozenset({"momentum", "beta1", "beta2", "decay"})


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """The rule of stochastic gradient descent, as torch.optim.SGD computes it.

    Examples:
        >>> rule = shardwell.SGD(lr=0.1, momentum=0.9, nesterov=True)
        >>> net = client.parameter("by_sgd", size=3, optimizer=rule)
    """

    learning_rate: float = dataclasses.field(default=_NOT_GIVEN, kw_only=False)
    """Step length, at least 0. No default: it depends on the model."""
    momentum: float = 0.0
    """In [0, 1). 0 (default) keeps no state on the shard."""
    dampening: float = 0.0
    """In [0, 1]. 0 is the usual choice."""
    nesterov: bool = False
    """Nesterov's momentum; needs momentum above 0 and no dampening."""
    weight_decay: float = 0.0
    """L2 factor; 0 (default) is none."""

    field_name: ClassVar[str] = "sgd"

    @override
    def __post_init__(self, lr: float | None) -> None:
        super().__post_init__(lr)
        if self.dampening > 1.0:
            raise ArgumentError(f"SGD.dampening must be in [0, 1]; got {self.dampening}")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ArgumentError(
                "SGD.nesterov needs momentum above 0 and dampening 0; got "
                f"momentum={self.momentum}, dampening={self.dampening}"
            )


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """The Adagrad rule (Duchi et al., 2011), as torch.optim.Adagrad computes it.

    Examples:
        >>> rule = shardwell.Adagrad(lr=0.05)
        >>> users = client.table("by_adagrad", row_count=None, dim=8, optimizer=rule)
    """

    learning_rate: float = dataclasses.field(default=_NOT_GIVEN, kw_only=False)
    """Step length, at least 0."""
    epsilon: float = 1e-10
    """Added to the denominator; the field's default."""
    initial_accumulator: float = 0.0
    """Where the sums of squares start."""
    weight_decay: float = 0.0
    """L2 factor."""

    field_name: ClassVar[str] = "adagrad"
    _slots: ClassVar[tuple[str, ...]] = ("sum",)


@dataclass(frozen=True, kw_only=True)
class RMSProp(Optimizer):
    """The RMSProp rule (Tieleman and Hinton, 2012), as torch.optim.RMSprop, not centered.

    Examples:
        >>> net = client.parameter("by_rmsprop", size=3, optimizer=shardwell.RMSProp(lr=1e-3))
    """

    learning_rate: float = dataclasses.field(default=_NOT_GIVEN, kw_only=False)
    """Step length, at least 0."""
    decay: float = 0.99
    """Decay of the running mean of squares; in [0, 1)."""
    epsilon: float = 1e-8
    """Added to the denominator."""
    momentum: float = 0.0
    """In [0, 1). 0 (default) keeps no second state."""
    weight_decay: float = 0.0
    """L2 factor."""

    field_name: ClassVar[str] = "rms_prop"
    _slots: ClassVar[tuple[str, ...]] = ("square_avg",)


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """The Adam rule (Kingma and Ba, 2015), as torch.optim.Adam computes it.

    Examples:
        >>> net = client.parameter("by_adam", size=3, optimizer=shardwell.Adam(lr=1e-3))
    """

    learning_rate: float = dataclasses.field(default=1e-3, kw_only=False)
    """Step length; the paper's default."""
    beta1: float = 0.9
    """Decay of the first moment; in [0, 1)."""
    beta2: float = 0.999
    """Decay of the second moment; in [0, 1)."""
    epsilon: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """L2 factor, added to the gradient."""

    field_name: ClassVar[str] = "adam"
    _slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """The AdamW rule: decoupled weight decay (Loshchilov and Hutter, 2019), as in torch.optim.

    Examples:
        >>> rule = shardwell.AdamW(lr=3e-4, weight_decay=0.1, clip_norm=1.0)
        >>> net = client.parameter("by_adamw", size=3, optimizer=rule)
    """

    learning_rate: float = dataclasses.field(default=1e-3, kw_only=False)
    """Step length; the paper's default."""
    beta1: float = 0.9
    """Decay of the first moment; in [0, 1)."""
    beta2: float = 0.999
    """Decay of the second moment; in [0, 1)."""
    epsilon: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.01
    """Decoupled decay factor; the paper's (and torch's) default."""

    field_name: ClassVar[str] = "adam_w"
    _slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Average(Optimizer):
    """No optimizer: the weights become the step's mean gradient, so `exchange` is an all-reduce.

    Examples:
        >>> mean = client.parameter("mean", size=3, optimizer=shardwell.Average())
        >>> mean.exchange([1.0, 2.0, 3.0])  # the mean over all workers; here of one
        array([1., 2., 3.], dtype=float32)
    """

    field_name: ClassVar[str] = "average"


OF_PARAMETERS = tuple(kind for kind in Optimizer.__subclasses__() if kind not in OF_TABLES)
