"""The spec of a parameter, on which all its workers agree.

Value objects, checked when made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from typing_extensions import override

from shardwell.errors import ArgumentError
from shardwell.specs.checks import (
    brief,
    check_number,
    check_whole_number,
    differences_of,
)
from shardwell.specs.fragments import Fragment
from shardwell.specs.grouped_rate import factors_of, rate_of
from shardwell.specs.layout import SIZE_MAX, TensorLayout
from shardwell.specs.members import BOUND_S_MAX, Elastic
from shardwell.specs.names import check_name
from shardwell.specs.optimizers import OF_PARAMETERS, Average, Optimizer, check_learning_rate
from shardwell.specs.wire_form import Form, Record, name_of
from shardwell.v1 import types_pb2

WireName = Literal["fp32", "fp16", "bf16"]
CodecName = Literal[WireName, "fp32+lz4", "fp16+lz4", "bf16+lz4", "int8"]
"""A form of values, maybe compressed; or in blocks, of parameters alone."""
ModeName = Literal["sync", "async"]

_OF_LAYOUT = ("size:", "layout.", "layout:")
"""Beginnings of differences that are listed tensor by tensor."""
BLOCK_SIZES = {"int8": 4096}
"""Elements that have one scale, of codecs that write in blocks."""
_BLOCK_SIZE_MAX = 256
_BLOCK_COUNT_MIN = 32
"""A parameter has as many, unless it has fewer elements: so shards share a small one, too."""
WORKER_COUNT_MAX = 2**16
SAMPLE_COUNT_MAX = 2**24
STEP_MAX = 2**62
STATE_PAGE_MAX_BYTES = 10**6
"""Most bytes of a page of a worker's state beside its weights, and of its beginning."""
STATE_PAGE_COUNT_MAX = 64
STATE_SIZE_MAX_BYTES = STATE_PAGE_COUNT_MAX * STATE_PAGE_MAX_BYTES
"""Most bytes of such a state: `Parameter.keep_state`."""
STATE_DIGEST_BYTES = 32
"""Those of the SHA-256 digest of a page."""

WIRE_CODECS = {
    "fp32": types_pb2.CODEC_FP32,
    "fp16": types_pb2.CODEC_FP16,
    "bf16": types_pb2.CODEC_BF16,
    "int8": types_pb2.CODEC_INT8,
}
GROUP_CODECS = {name: value for name, value in WIRE_CODECS.items() if name in get_args(WireName)}
"""Codecs that partial sums of groups may have."""
WIRE_MODES = {"sync": types_pb2.MODE_SYNC, "async": types_pb2.MODE_ASYNC}


def block_size_of(size: int) -> int:
    """The elements of a block of a parameter of `size` elements: a power of two, at most 256.

    Blocks are counted from the parameter's start, and neither a slice nor a chunk cuts one: each
    has its scale in fp16 and its part of a norm, whatever the number of shards.
    """
    return min(1 << max(size // _BLOCK_COUNT_MIN, 1).bit_length() - 1, _BLOCK_SIZE_MAX)


def codec_words(codec: types_pb2.Codec) -> str:
    """Returns the name that users give a codec of the wire."""
    return next((name for name, value in WIRE_CODECS.items() if value == codec), f"{codec}")


def _codec_of(message: Any) -> str:
    name: str = name_of(WIRE_CODECS, "codec", message.codec)
    if message.compression == types_pb2.COMPRESSION_LZ4:
        return f"{name}+lz4"
    if message.compression != types_pb2.COMPRESSION_NONE:
        raise ArgumentError(f"compression {message.compression} is unspecified or unknown")
    return name


def _codec_fields(codec: CodecName) -> dict[str, Any]:
    name = codec.removesuffix("+lz4")
    lz4 = types_pb2.COMPRESSION_NONE if name == codec else types_pb2.COMPRESSION_LZ4
    return {"codec": WIRE_CODECS[name], "compression": lz4}


class TrainingSpec(Record[Any]):
    """The base of the specs of parameters and of tables."""

    name: str
    optimizer: Optimizer
    worker_count: int
    codec: CodecName
    mode: ModeName
    allow_non_finite: bool
    members: Elastic | None
    min_contributors = 0
    """A field of ParameterSpec; tables have none."""
    fragment: Fragment | None = None

    FORMS: ClassVar[Mapping[str, Any]] = {
        "optimizer": Optimizer,
        "codec": Form(_codec_of, _codec_fields),
        "mode": WIRE_MODES,
        "members": Elastic,
    }

    def check_training(self) -> None:
        """Refuses fields that contradict each other, or are out of range."""
        if self.codec not in get_args(CodecName):
            raise ArgumentError(f"codec must be one of {get_args(CodecName)}; got {self.codec!r}")
        if self.mode not in get_args(ModeName):
            raise ArgumentError(f"mode must be 'sync' or 'async'; got {self.mode!r}")
        if not isinstance(self.allow_non_finite, bool):
            raise ArgumentError(f"allow_non_finite must be a bool; got {self.allow_non_finite!r}")
        if self.mode == "sync":
            check_whole_number("worker_count", self.worker_count, 1, WORKER_COUNT_MAX)
        else:
            check_whole_number("worker_count (in async mode)", self.worker_count, 0, 0)
        if self.members is None:
            return
        if not isinstance(self.members, Elastic):
            raise ArgumentError(f"members must be shardwell.Elastic; got {brief(self.members)}")
        if self.mode != "sync":
            raise ArgumentError("members= needs mode='sync': async steps wait for no worker")
        if self.worker_count != self.members.max_count:
            raise ArgumentError(
                f"worker_count must be left out where members= says who makes a step, or be its "
                f"max_count={self.members.max_count}; got {self.worker_count}"
            )

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The arrays that shards keep beside the weights, in their order."""
        return self.optimizer.slot_names

    @functools.cached_property
    def has_open_sets(self) -> bool:
        """True if a step may close without a worker that could have contributed."""
        return self.members is not None or self.min_contributors > 0

    @functools.cached_property
    def step_size_max(self) -> int:
        """The gradients that a synchronous step may have."""
        return self.worker_count if self.members is None else self.members.seat_count_max

    def rate_of_step(self, learning_rate: float, contributor_count: int) -> float:
        """The learning rate of a step of so many gradients; see `Elastic.reference_count`."""
        reference = 0 if self.members is None else self.members.reference_count
        if not reference:
            return learning_rate
        return rate_of(learning_rate * contributor_count / reference, factors_of(learning_rate))

    @property
    def crew(self) -> str:
        """The workers that make a step, for messages and status: "4 workers", "2 to 64 members"."""
        if self.members is not None:
            return f"{self.members.min_count} to {self.members.max_count} members"
        return f"{self.worker_count} worker{'s' * (self.worker_count != 1)}"

    @property
    def lz4(self) -> bool:
        """True if payloads may be compressed."""
        return self.codec.endswith("+lz4")

    @property
    def codec_name(self) -> str:
        """The codec without its compression."""
        return self.codec.removesuffix("+lz4")

    def with_given(self, given: dict[str, Any]) -> Self:
        """Returns the spec with other values of some fields.

        Where the mode makes worker_count meaningless, it is not looked at; where it must be chosen,
        it is 1.
        """
        values = dict(given)
        members = values.get("members")
        if members is not None:
            values["worker_count"] = members.max_count
        elif "worker_count" in values:
            values["members"] = None
        if values.get("mode", self.mode) == "async":
            values["worker_count"] = 0
        elif self.mode == "async":
            values.setdefault("worker_count", 1)
        return dataclasses.replace(self, **values)  # type: ignore[type-var]

    def differences(self, other: Self) -> list[str]:
        """The fields in which `other` differs, each as "field: mine exists, theirs was asked for".

        Of another mode, the mode first, and not the count of workers, which follows from it.
        """
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        names = [field.name for field in fields if field.compare]
        if self.mode != other.mode:
            names = ["mode", *(name for name in names if name not in ("mode", "worker_count"))]
        return [
            each
            for name in names
            for each in differences_of(name, getattr(self, name), getattr(other, name))
        ]


@dataclass(frozen=True, kw_only=True)
class ParameterSpec(TrainingSpec):
    """The properties of a parameter on which all its workers must agree; checked when made.

    Raises:
        ArgumentError: a value is out of its range.

    Examples:
        >>> client.parameter("net", size=3, optimizer=shardwell.SGD(lr=0.5)).spec.codec
        'fp16'
    """

    name: str
    """1 to 128 letters, digits, `.`, `_`, `-`."""
    size: int
    """Number of float32 elements, 1 to 2^48."""
    optimizer: Optimizer
    """The update rule on the shards."""
    worker_count: int
    """Workers that make a synchronous step; 0 in asynchronous mode, where it has no meaning. With
    `members`, their max_count."""
    codec: CodecName = "fp16"
    """How chunks travel. fp16 halves the bytes and never overflows; it may lose values of at most
    2^-39 of their block's largest."""
    mode: ModeName = "sync"
    """`sync`: the mean of worker_count gradients a step; `async`: each gradient as it arrives."""
    allow_non_finite: bool = False
    """Let NaN and infinity through; the default refuses them, with their index."""
    layout: TensorLayout | None = None
    """The tensors in it; None: it is one vector."""
    members: Elastic | None = None
    """Workers that come and go make its steps; None: worker_count of them, for good."""
    min_contributors: int = 0
    """A chunk's step closes `grace_s` after so many gradients at the latest; 0: it has all."""
    grace_s: float = 0.0
    """How long after that a chunk's step closes, in seconds."""
    fragment: Fragment | None = None
    """Of which family it is a fragment; None: it is none."""
    cuts_blocks: bool = dataclasses.field(default=False, compare=False)
    """Slices and chunks are cut at any element: version 0.2.0 or an earlier one made it. Shards say
    so, and no worker need know it: specs that differ in it alone are equal."""

    MESSAGE: ClassVar[Any] = types_pb2.ParameterSpec
    FORMS: ClassVar[Mapping[str, Any]] = {
        **TrainingSpec.FORMS,
        "layout": TensorLayout,
        "fragment": Fragment,
    }

    def __post_init__(self) -> None:
        check_name("parameter name", self.name)
        check_whole_number("size", self.size, 1, SIZE_MAX)
        if not isinstance(self.optimizer, OF_PARAMETERS):
            kinds = ", ".join(kind.__name__ for kind in OF_PARAMETERS)
            raise ArgumentError(
                f"optimizer must be one of shardwell.{kinds}; got {brief(self.optimizer)}"
            )
        if self.layout is not None and self.layout.size != self.size:
            raise ArgumentError(
                f"size must be that of all tensors, {self.layout.size}; got {self.size}"
            )
        is_average = isinstance(self.optimizer, Average)
        if is_average and self.layout is not None and self.layout.has_options:
            raise ArgumentError("Average updates nothing: groups= of its tensors have no meaning")
        self.check_training()
        self._check_quorum()
        self._check_fragment()
        if self.has_image and self.allow_non_finite:
            raise ArgumentError(
                f"codec={self.codec!r} writes finite values alone: leave allow_non_finite out, or "
                "choose fp16"
            )

    def _check_fragment(self) -> None:
        fragment = self.fragment
        if fragment is None:
            return
        if not isinstance(fragment, Fragment):
            raise ArgumentError(f"fragment must be shardwell.Fragment; got {brief(fragment)}")
        if self.name != fragment.parameter:
            raise ArgumentError(
                f"fragment {fragment.index} of family {fragment.family!r} is parameter "
                f"{fragment.parameter!r}; got the name {self.name!r}"
            )

    def _check_quorum(self) -> None:
        check_whole_number("min_contributors", self.min_contributors, 0, WORKER_COUNT_MAX)
        if self.min_contributors and self.mode != "sync":
            raise ArgumentError(
                "min_contributors needs mode='sync': async steps wait for no worker; got mode="
                f"{self.mode!r}"
            )
        if self.min_contributors > self.worker_count:
            most = "worker_count" if self.members is None else "max_count of members"
            raise ArgumentError(
                f"min_contributors must be at most {most}={self.worker_count}; got "
                f"{self.min_contributors}"
            )
        check_number("grace_s", self.grace_s, low=0.0, below=BOUND_S_MAX)
        if self.grace_s and not self.min_contributors:
            raise ArgumentError(
                f"grace_s={self.grace_s:g} begins with gradient number min_contributors of a step; "
                "give min_contributors, too"
            )

    @override
    def differences(self, other: Self) -> list[str]:
        if self.layout is None or self.layout == other.layout:
            return super().differences(other)
        rest = [each for each in super().differences(other) if not each.startswith(_OF_LAYOUT)]
        return [self.layout.difference(other.layout), *rest]

    @functools.cached_property
    def closes_by_norm(self) -> bool:
        """True if a step closes in two phases, by the norm of its mean gradient: CloseStep.

        Of one worker, or in asynchronous mode, the worker knows that norm, and clips itself.
        """
        return self.optimizer.clip_norm > 0 and self.worker_count > 1

    @property
    def keeps_versions(self) -> bool:
        """True if shards keep the version before each chunk's, for a worker that was restarted.

        Asynchronous steps have no version that all workers read; and where a step may close without
        a worker, no shard needs its gradient again.
        """
        return self.mode == "sync" and not self.has_open_sets

    @functools.cached_property
    def has_image(self) -> bool:
        """True if shards keep, next to the weights, the values that rounding has left with others.

        With a codec that writes in blocks: the image of the weights, which everybody holds who has
        taken a version; or, of an Average, what rounding took off its means.
        """
        return self.codec_name in BLOCK_SIZES

    @property
    @override
    def slot_names(self) -> tuple[str, ...]:
        """The arrays that shards keep beside the weights: the optimizer's, then the image."""
        return (*self.optimizer.slot_names, *(["image"] if self.has_image else []))

    @functools.cached_property
    def block_size(self) -> int:
        """The elements of a block: they have one scale, and one part of a norm."""
        return BLOCK_SIZES.get(self.codec_name) or block_size_of(self.size)

    @property
    def slice_unit(self) -> int:
        """The elements that stay together where it is cut among shards, and into chunks."""
        return 1 if self.cuts_blocks and not self.has_image else self.block_size

    def check_has_rate(self) -> None:
        """Refuses to give a learning rate to an optimizer without one.

        Raises:
            ArgumentError: it has none.
        """
        if isinstance(self.optimizer, Average):
            raise ArgumentError(
                f"parameter {self.name!r}: {self.optimizer!r} has no learning rate",
                parameter=self.name,
            )

    def check_rate(self, learning_rate: float) -> float:
        """Returns a learning rate if the parameter's updates can have it.

        Raises:
            ArgumentError: the optimizer has none, it is out of its range, or it has factors for
                other groups than the parameter has.
        """
        self.check_has_rate()
        check_learning_rate("learning_rate", learning_rate)
        factors, count = factors_of(learning_rate), 0
        if factors:
            count = 0 if self.layout is None else self.layout.rate_group_count
        if len(factors) != count:
            raise ArgumentError(
                f"parameter {self.name!r}: learning_rate has factors for {len(factors)} groups, "
                f"and the parameter has {count}; give each group's, in the order of rate_group",
                parameter=self.name,
            )
        return learning_rate

    def element(self, index: int) -> str:
        """An element for messages: with the tensor that it is in, if there are tensors."""
        if self.layout is None:
            return f"element {index}"
        tensor = self.layout.at(index)
        return f"element {index - tensor.offset} of tensor {tensor.name!r}"
