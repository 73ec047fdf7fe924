"""What a parameter is: optimizers and the spec that every worker must agree on.

Value objects, checked when made; the wire knows them through `to_proto` and `from_proto`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from shardwell.errors import ArgumentError
from shardwell.names import check_name
from shardwell.v1 import types_pb2

CodecName = Literal["fp32", "fp16", "bf16", "fp32+lz4", "fp16+lz4", "bf16+lz4"]
ModeName = Literal["sync", "async"]

SIZE_MAX = 2**48
_NUMBER_MAX = float(2**1023)  # what comes here is turned into a float
WORKER_COUNT_MAX = 2**16
SAMPLE_COUNT_MAX = 2**24
STEP_MAX = 2**62


def _check_number(what: str, value: float, *, low: float = 0.0, below: float = math.inf) -> None:
    """Refuses what is no real number in [low, below)."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (good and low <= value < below and value <= _NUMBER_MAX):
        limit = f"at least {low:g}" if below == math.inf else f"in [{low:g}, {below:g})"
        raise ArgumentError(f"{what} must be a finite number {limit}; got {value!r}")


def check_learning_rate(what: str, value: float) -> float:
    """Returns `value` if it can be a learning rate: finite and at least 0.

    Raises:
        ArgumentError: it is not.
    """
    _check_number(what, value)
    return float(value)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What all update rules share. Runs on the shards, per chunk, in float32."""

    clip_value: float = 0.0
    """Elements of the mean gradient are clipped to [-clip_value, clip_value] first. 0 (default):
    no clipping."""

    field_name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("bool", bool):
                if not isinstance(value, bool):
                    raise ArgumentError(f"{self._name(field.name)} must be a bool; got {value!r}")
            else:
                below = 1.0 if field.name in _IN_UNIT_INTERVAL else math.inf
                _check_number(self._name(field.name), value, below=below)
        if getattr(self, "epsilon", 1.0) == 0.0:
            raise ArgumentError(f"{self._name('epsilon')} must be above 0; got 0.0")

    def _name(self, field: str) -> str:
        return f"{type(self).__name__}.{field}"

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Arrays of state, in the order of the shards', named as torch.optim names them."""
        return ()

    def to_proto(self) -> types_pb2.Optimizer:
        """The wire's form."""
        rule = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        clip_value = rule.pop("clip_value")
        message = types_pb2.Optimizer(clip_value=clip_value)
        target = getattr(message, self.field_name)
        target.SetInParent()
        for name, value in rule.items():
            setattr(target, name, value)
        return message

    @staticmethod
    def from_proto(message: types_pb2.Optimizer) -> Optimizer:
        """The value that a message describes.

        Raises:
            ArgumentError: no rule is set, or a value is out of range.
        """
        name = message.WhichOneof("rule")
        kind = next((k for k in Optimizer.__subclasses__() if k.field_name == name), None)
        if name is None or kind is None:
            raise ArgumentError("optimizer.rule must be set; it is missing")
        rule = getattr(message, name)
        values = {field.name: getattr(rule, field.name) for field in rule.DESCRIPTOR.fields}
        return kind(clip_value=message.clip_value, **values)


_IN_UNIT_INTERVAL = frozenset({"momentum", "beta1", "beta2", "decay"})


@dataclass(frozen=True, kw_only=True)
class Average(Optimizer):
    """No optimizer: the weights become the step's mean gradient, so `exchange` is an all-reduce."""

    field_name: ClassVar[str] = "average"


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD computes it."""

    learning_rate: float
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

    @property
    def slot_names(self) -> tuple[str, ...]:
        """See Optimizer."""
        return ("momentum_buffer",) if self.momentum else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dampening > 1.0:
            raise ArgumentError(f"SGD.dampening must be in [0, 1]; got {self.dampening}")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ArgumentError(
                "SGD.nesterov needs momentum above 0 and dampening 0; got "
                f"momentum={self.momentum}, dampening={self.dampening}"
            )


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011), as torch.optim.Adagrad computes it."""

    learning_rate: float
    """Step length, at least 0."""
    epsilon: float = 1e-10
    """Added to the denominator; the field's default."""
    initial_accumulator: float = 0.0
    """Where the sums of squares start."""
    weight_decay: float = 0.0
    """L2 factor."""

    field_name: ClassVar[str] = "adagrad"

    @property
    def slot_names(self) -> tuple[str, ...]:
        """See Optimizer."""
        return ("sum",)


@dataclass(frozen=True, kw_only=True)
class RMSProp(Optimizer):
    """RMSProp (Tieleman and Hinton, 2012), as torch.optim.RMSprop computes it, not centered."""

    learning_rate: float
    """Step length, at least 0."""
    decay: float = 0.99
    """Of the running mean of squares; in [0, 1)."""
    epsilon: float = 1e-8
    """Added to the denominator."""
    momentum: float = 0.0
    """In [0, 1). 0 (default) keeps no second state."""
    weight_decay: float = 0.0
    """L2 factor."""

    field_name: ClassVar[str] = "rms_prop"

    @property
    def slot_names(self) -> tuple[str, ...]:
        """See Optimizer."""
        return ("square_avg", "momentum_buffer") if self.momentum else ("square_avg",)


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), as torch.optim.Adam computes it."""

    learning_rate: float = 1e-3
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

    @property
    def slot_names(self) -> tuple[str, ...]:
        """See Optimizer."""
        return ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch.optim.AdamW."""

    learning_rate: float = 1e-3
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

    @property
    def slot_names(self) -> tuple[str, ...]:
        """See Optimizer."""
        return ("exp_avg", "exp_avg_sq")


WIRE_CODECS = {
    "fp32": types_pb2.CODEC_FP32,
    "fp16": types_pb2.CODEC_FP16,
    "bf16": types_pb2.CODEC_BF16,
}
_MODES = {"sync": types_pb2.MODE_SYNC, "async": types_pb2.MODE_ASYNC}


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What all workers of a parameter must agree on; checked when made.

    Raises:
        ArgumentError: a value is out of its range.
    """

    name: str
    """1 to 128 letters, digits, `.`, `_`, `-`."""
    size: int
    """Number of float32 elements, 1 to 2^48."""
    optimizer: Optimizer
    """The update rule on the shards."""
    worker_count: int
    """Workers that make a synchronous step; 0 in asynchronous mode, where it has no meaning."""
    codec: CodecName = "fp16"
    """How chunks travel; fp16 halves the bytes and, scaled, neither overflows nor vanishes."""
    mode: ModeName = "sync"
    """`sync`: the mean of worker_count gradients a step; `async`: each gradient as it arrives."""
    allow_non_finite: bool = False
    """Let NaN and infinity through; the default refuses them, with their place."""

    def __post_init__(self) -> None:
        check_name("parameter name", self.name)
        _check_integer("size", self.size, 1, SIZE_MAX)
        if not isinstance(self.optimizer, Optimizer) or type(self.optimizer) is Optimizer:
            raise ArgumentError(
                "optimizer must be one of shardwell.SGD, Adagrad, RMSProp, Adam, AdamW, Average; "
                f"got {self.optimizer!r:.80}"
            )
        if self.codec not in get_args(CodecName):
            raise ArgumentError(f"codec must be one of {get_args(CodecName)}; got {self.codec!r}")
        if self.mode not in get_args(ModeName):
            raise ArgumentError(f"mode must be 'sync' or 'async'; got {self.mode!r}")
        if not isinstance(self.allow_non_finite, bool):
            raise ArgumentError(f"allow_non_finite must be a bool; got {self.allow_non_finite!r}")
        if self.mode == "sync":
            _check_integer("worker_count", self.worker_count, 1, WORKER_COUNT_MAX)
        else:
            _check_integer("worker_count (in async mode)", self.worker_count, 0, 0)

    @property
    def lz4(self) -> bool:
        """Whether chunks may be compressed."""
        return self.codec.endswith("+lz4")

    @property
    def codec_name(self) -> str:
        """The codec without its compression."""
        return self.codec.removesuffix("+lz4")

    def to_proto(self) -> types_pb2.ParameterSpec:
        """The wire's form."""
        return types_pb2.ParameterSpec(
            name=self.name,
            size=self.size,
            codec=WIRE_CODECS[self.codec_name],
            compression=(types_pb2.COMPRESSION_LZ4 if self.lz4 else types_pb2.COMPRESSION_NONE),
            mode=_MODES[self.mode],
            worker_count=self.worker_count,
            optimizer=self.optimizer.to_proto(),
            allow_non_finite=self.allow_non_finite,
        )

    @staticmethod
    def from_proto(message: types_pb2.ParameterSpec) -> ParameterSpec:
        """The value that a message describes.

        Raises:
            ArgumentError: an enum is unspecified or unknown, or a value is out of range.
        """
        codec = _name_of(WIRE_CODECS, "codec", message.codec)
        if message.compression == types_pb2.COMPRESSION_LZ4:
            codec += "+lz4"
        elif message.compression != types_pb2.COMPRESSION_NONE:
            raise ArgumentError(f"compression {message.compression} is unspecified or unknown")
        values: dict[str, Any] = {
            "codec": codec,
            "mode": _name_of(_MODES, "mode", message.mode),
        }
        return ParameterSpec(
            name=message.name,
            size=message.size,
            optimizer=Optimizer.from_proto(message.optimizer),
            worker_count=message.worker_count,
            allow_non_finite=message.allow_non_finite,
            **values,
        )

    def differences(self, other: ParameterSpec) -> list[str]:
        """Fields in which `other` differs, each as "field: mine here, theirs there"."""
        return [
            f"{field.name}: {mine!r} exists, {theirs!r} was asked for"
            for field in dataclasses.fields(self)
            if (mine := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        ]


def _check_integer(what: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ArgumentError(f"{what} must be an integer from {low} to {high}; got {value!r}")


def _name_of(names: dict[str, Any], what: str, value: int) -> str:
    for name, number in names.items():
        if number == value:
            return name
    raise ArgumentError(f"{what} {value} is unspecified or unknown")
