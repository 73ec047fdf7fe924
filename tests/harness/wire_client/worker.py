"""A worker made of the generated stubs, NumPy and a CRC, following what the .proto files say.

It shares no code with the SDK: payloads are written with plain protobuf serialisation, without
padding, and numbers are converted here. Where it and the SDK train together, the .proto suffices.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from harness.tokens import bearing
from harness.wire_client import crc as wire_crc
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import parameter_server_pb2_grpc as pb_grpc
from shardwell.v1 import session_pb2, session_pb2_grpc
from shardwell.v1 import types_pb2 as types

Float32 = npt.NDArray[np.float32]
CALL_TIMEOUT_S = 60.0
INIT_RANGE_ELEMENT_COUNT_MAX = 262144


def encode(values: npt.ArrayLike, codec: int, block: int) -> bytes:
    """The codec's bytes; `block` is the elements that have a scale of their own in fp16."""
    array = np.ascontiguousarray(values, np.dtype("<f4"))
    if codec == types.CODEC_FP32:
        return array.tobytes()
    if codec == types.CODEC_FP16:
        written, exponents = [], []
        for start in range(0, array.size, block):
            part = array[start : start + block].astype(np.float64)
            peak = float(np.abs(part[np.isfinite(part)]).max(initial=0.0))
            exponent = max(math.frexp(peak)[1] - 15, -126) if peak else 0
            halves = np.ldexp(part, -exponent).astype("<f2")
            if exponent == 113:  # 2^15 would be 2^128, which no float32 holds
                halves = np.where(np.abs(halves) == 2.0**15, np.copysign(32752, halves), halves)
            written.append(halves.astype("<f2").tobytes())
            exponents.append(exponent)
        return b"".join(written) + struct.pack(f"{len(exponents)}b", *exponents)
    assert codec == types.CODEC_BF16
    bits = array.view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    overflow = np.isfinite(array) & ((rounded & 0x7FFF) == 0x7F80)
    return np.where(overflow, rounded - 1, rounded).astype("<u2").tobytes()


def decode(payload: bytes, codec: int, block: int, count: int) -> Float32:
    """The values, (count,) float32."""
    if codec == types.CODEC_FP32:
        return np.frombuffer(payload, "<f4").astype(np.float32)
    if codec == types.CODEC_FP16:
        values = np.frombuffer(payload[: 2 * count], "<f2").astype(np.float64)
        exponents = struct.unpack(f"{-(-count // block)}b", payload[2 * count :])
        return np.ldexp(values, np.repeat(exponents, block)[:count]).astype("<f4")
    return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)


def block_of(size: int) -> int:
    """Elements of a block of a parameter of so many."""
    return int(min(2 ** math.floor(math.log2(max(size // 32, 1))), 256))


def sgd(learning_rate: float) -> types.Optimizer:
    """Plain SGD on the wire."""
    return types.Optimizer(sgd=types.Sgd(learning_rate=learning_rate))


def spec(name: str = "w", size: int = 10, **fields: Any) -> types.ParameterSpec:
    """A ParameterSpec with what most tests want."""
    values: dict[str, Any] = {
        "codec": types.CODEC_FP32,
        "compression": types.COMPRESSION_NONE,
        "mode": types.MODE_SYNC,
        "optimizer": sgd(1.0),
    }
    values.update(fields)
    if values["mode"] == types.MODE_SYNC:
        values.setdefault("worker_count", 1)
    return types.ParameterSpec(name=name, size=size, **values)


def error_detail(error: grpc.RpcError) -> types.ErrorDetail:
    """What a failed call says of itself in its trailing metadata.

    Raises:
        AssertionError: it has no ErrorDetail.
    """
    found = dict(error.trailing_metadata() or ())
    assert "shardwell-error-bin" in found, f"no ErrorDetail with {error.code()}: {error.details()}"
    return types.ErrorDetail.FromString(found["shardwell-error-bin"])


@dataclass(frozen=True)
class WireSlice:
    """What one shard owns of a parameter."""

    shard_index: int
    offset: int
    size: int
    chunk_element_count: int

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """(chunk_index, start, stop) in elements of the parameter."""
        step = self.chunk_element_count
        for index, start in enumerate(range(0, self.size, step)):
            yield index, self.offset + start, self.offset + min(start + step, self.size)


class WireWorker:
    """A connection to every shard. A context manager."""

    def __init__(self, target: str, worker_id: str, *, attends: bool = True) -> None:
        self.target = target
        self.worker_id = worker_id
        self.session = secrets.randbits(64) or 1
        self.channels = [
            grpc.intercept_channel(bearing(grpc.insecure_channel(address)), wire_crc.Sealing())
            for address in target.split(",")
        ]
        self.stubs = [pb_grpc.ParameterServerServiceStub(channel) for channel in self.channels]
        self.identities = [
            stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_TIMEOUT_S).shard
            for stub in self.stubs
        ]
        self.attendances = [self.attend(index) for index in range(len(self.stubs)) if attends]

    def attend(self, shard_index: int, **fields: Any) -> Any:
        """Opens the call that says that the session is alive; returns when the shard knows."""
        values = {
            "shard": self.identities[shard_index],
            "worker_id": self.worker_id,
            "session": self.session,
            "host": "wire",
            "pid": 1,
        }
        call = session_pb2_grpc.SessionServiceStub(self.channels[shard_index]).Attend(
            session_pb2.AttendRequest(**{**values, **fields})
        )
        call.initial_metadata()
        return call

    def end_session(self) -> None:
        """Says on every shard that the session has ended."""
        for channel, identity in zip(self.channels, self.identities, strict=True):
            session_pb2_grpc.SessionServiceStub(channel).EndSession(
                session_pb2.EndSessionRequest(shard=identity, session=self.session),
                timeout=CALL_TIMEOUT_S,
            )

    def create(
        self, parameter_spec: types.ParameterSpec, *, take_seat: bool = False, **fields: Any
    ) -> WireParameter:
        """CreateParameter on every shard."""
        answers = self.open_parameter(parameter_spec, take_seat=take_seat, **fields)
        return WireParameter(self, parameter_spec, answers)

    def open_parameter(
        self, parameter_spec: types.ParameterSpec, **fields: Any
    ) -> list[pb.CreateParameterResponse]:
        """What every shard answers to CreateParameter; for a seat a tenure is drawn.

        Shard 0 says which incarnation is meant on the others, and whether they must have it.
        """
        if fields.get("take_seat"):
            fields.setdefault("tenure", secrets.randbits(64) or 1)
        answers: list[pb.CreateParameterResponse] = []
        for stub, identity in zip(self.stubs, self.identities, strict=True):
            request = pb.CreateParameterRequest(
                shard=identity,
                worker_id=self.worker_id,
                spec=parameter_spec,
                session=self.session,
                **fields,
            )
            answers.append(stub.CreateParameter(request, timeout=CALL_TIMEOUT_S))
            fields.setdefault("incarnation", answers[0].incarnation)
            fields.setdefault("must_exist", answers[0].begun)
        return answers

    def close(self) -> None:
        """Ends the connections."""
        for channel in self.channels:
            channel.close()

    def __enter__(self) -> WireWorker:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


class WireParameter:
    """A parameter as the wire knows it."""

    def __init__(
        self,
        worker: WireWorker,
        parameter_spec: types.ParameterSpec,
        answers: list[pb.CreateParameterResponse],
    ) -> None:
        self.worker = worker
        self.spec = parameter_spec
        self.slices = [
            WireSlice(index, answer.slice_offset, answer.slice_size, answer.chunk_element_count)
            for index, answer in enumerate(answers)
        ]
        self.next_step = min(answer.next_step for answer in answers if answer.slice_size)
        self.tenure = answers[0].tenure
        self.incarnation = answers[0].incarnation

    def take_seat(self) -> None:
        """Takes this worker's seats, and begins anew where some of them were given away."""
        own = {"take_seat": True, "incarnation": self.incarnation}
        answers = self.worker.open_parameter(self.spec, **own)
        if len({answer.tenure for answer in answers}) > 1:
            answers = self.worker.open_parameter(self.spec, **own, begins_anew=True)
        (self.tenure,) = {answer.tenure for answer in answers}
        self.next_step = min(answer.next_step for answer in answers if answer.slice_size)

    def open(self, shard_index: int) -> types.StreamOpen:
        """What a stream's first message has."""
        opening = types.StreamOpen(
            shard=self.worker.identities[shard_index],
            parameter=self.spec.name,
            worker_id=self.worker.worker_id,
            session=self.worker.session,
            tenure=self.tenure,
            incarnation=self.incarnation,
        )
        return wire_crc.seal_message(opening)

    def claim_init(self, wait_timeout_s: float = 0.0) -> pb.ClaimInitResponse:
        """Asks shard 0 for the right to set the first weights."""
        return self.worker.stubs[0].ClaimInit(
            pb.ClaimInitRequest(
                shard=self.worker.identities[0],
                parameter=self.spec.name,
                worker_id=self.worker.worker_id,
                wait_timeout_ms=int(wait_timeout_s * 1000),
                incarnation=self.incarnation,
            ),
            timeout=CALL_TIMEOUT_S,
        )

    def init(self, weights: npt.ArrayLike) -> None:
        """Sets the first weights, or waits until another worker has."""
        while True:
            claim = self.claim_init(wait_timeout_s=CALL_TIMEOUT_S / 2)
            if claim.granted:
                for slice_ in reversed(self.slices):
                    self.init_shard(slice_.shard_index, weights, claim.epoch)
            if claim.granted or claim.initialized:
                self.confirm_init(claim.epoch)
                return

    def confirm_init(self, epoch: int) -> None:
        """Tells all shards but shard 0 that the first weights of an epoch stand."""
        for shard_index in range(1, len(self.worker.stubs)):
            self.worker.stubs[shard_index].ConfirmInit(
                pb.ConfirmInitRequest(
                    shard=self.worker.identities[shard_index],
                    parameter=self.spec.name,
                    epoch=epoch,
                    incarnation=self.incarnation,
                ),
                timeout=CALL_TIMEOUT_S,
            )

    def init_shard(self, shard_index: int, weights: npt.ArrayLike, epoch: int) -> None:
        """InitWeights on one shard."""
        messages = self.init_messages(shard_index, weights, epoch)
        self.worker.stubs[shard_index].InitWeights(iter(messages), timeout=CALL_TIMEOUT_S)

    def init_messages(
        self,
        shard_index: int,
        weights: npt.ArrayLike,
        epoch: int,
        *,
        range_element_count: int = INIT_RANGE_ELEMENT_COUNT_MAX,
    ) -> list[pb.InitWeightsRequest]:
        """The stream of first weights to one shard."""
        slice_ = self.slices[shard_index]
        values = np.asarray(weights, np.float32)
        messages = [pb.InitWeightsRequest(open=self.open(shard_index), epoch=epoch)]
        stop = slice_.offset + slice_.size
        for start in range(slice_.offset, stop, range_element_count):
            part = values[start : min(start + range_element_count, stop)]
            payload = encode(part, types.CODEC_FP32, 1)
            chunk = _chunk(0, start, part.size)
            messages.append(pb.InitWeightsRequest(chunk=chunk, payload=payload))
        if not slice_.size:
            empty = types.Chunk(element_offset=slice_.offset)
            messages.append(pb.InitWeightsRequest(chunk=empty))
        return self.seal_first_weights(messages)

    def seal(self, message: Any) -> Any:
        """A message with a chunk of this worker's gradient, whose CRC fits; changed in place."""
        return wire_crc.seal(message, wire_crc.GRADIENT, self.spec.name, self.worker.worker_id)

    def seal_first_weights(
        self, messages: list[pb.InitWeightsRequest]
    ) -> list[pb.InitWeightsRequest]:
        """The same for a stream of first weights, which begins with its opening."""
        for message in messages:
            if message.HasField("chunk"):
                wire_crc.seal(message, *wire_crc.first_weights(messages[0]))
        return messages

    def gradient_messages(
        self,
        kind: Any,
        shard_index: int,
        gradient: npt.ArrayLike,
        *,
        step: int | None = None,
        sample_count: int = 1,
        wait_timeout_s: float = 0.0,
    ) -> list[Any]:
        """The stream of one gradient to one shard; `kind` is its type of message."""
        if self.spec.mode == types.MODE_ASYNC and not self.tenure:
            self.take_seat()
        values = np.asarray(gradient, np.float32)
        messages = []
        chunks = list(self.slices[shard_index].chunks())
        for index, start, stop in chunks:
            payload = encode(values[start:stop], self.spec.codec, block_of(self.spec.size))
            header = types.GradientChunk(
                chunk=_chunk(index, start, stop - start),
                step=self.next_step if step is None else step,
                sample_count=sample_count,
                wait_timeout_ms=int(wait_timeout_s * 1000),
                end_of_step=index == len(chunks) - 1,
            )
            messages.append(self.seal(kind(gradient=header, payload=payload)))
        if messages:
            messages[0].open.CopyFrom(self.open(shard_index))
        return messages

    def push(self, gradient: npt.ArrayLike, *, sample_count: int = 1) -> int:
        """PutGradient on every shard with a slice; the step that it joined."""
        for shard_index, messages in self._streams(pb.PutGradientRequest, gradient, sample_count):
            answer = self.worker.stubs[shard_index].PutGradient(
                iter(messages), timeout=CALL_TIMEOUT_S
            )
            counted = answer.counted_chunk_count + answer.duplicate_chunk_count
            assert counted == len(messages)
        self.next_step += 1
        return self.next_step - 1

    def pull(self, *, min_version: int = 0, wait_timeout_s: float = 0.0) -> Float32:
        """GetWeights on every shard with a slice."""
        weights = np.full(self.spec.size, np.nan, np.float32)
        for slice_ in self.slices:
            if slice_.size:
                answers = self.worker.stubs[slice_.shard_index].GetWeights(
                    pb.GetWeightsRequest(
                        shard=self.worker.identities[slice_.shard_index],
                        parameter=self.spec.name,
                        worker_id=self.worker.worker_id,
                        min_version=min_version,
                        wait_timeout_ms=int(wait_timeout_s * 1000),
                        incarnation=self.incarnation,
                    ),
                    timeout=CALL_TIMEOUT_S,
                )
                self.take(slice_, answers, weights, min_version)
        return weights

    def fetch(
        self, shard_index: int, *, min_version: int = 0, wait_timeout_s: float = 0.0
    ) -> pb.ExchangeRequest:
        """What asks a stream of Exchange for a slice, and opens it."""
        fetch = pb.WeightsFetch(min_version=min_version, wait_timeout_ms=int(wait_timeout_s * 1000))
        fetch.crc32c = wire_crc.of_fetch(self.spec.name, fetch)
        return pb.ExchangeRequest(open=self.open(shard_index), fetch=fetch)

    def exchange(self, gradient: npt.ArrayLike, *, sample_count: int = 1) -> Float32:
        """Exchange on every shard with a slice; the weights after the step."""
        weights = np.full(self.spec.size, np.nan, np.float32)
        calls = {
            shard_index: self.worker.stubs[shard_index].Exchange(
                iter(messages), timeout=CALL_TIMEOUT_S
            )
            for shard_index, messages in self._streams(pb.ExchangeRequest, gradient, sample_count)
        }
        min_version = self.next_step + 1 if self.spec.mode == types.MODE_SYNC else 0
        for shard_index, answers in calls.items():
            self.take(self.slices[shard_index], answers, weights, min_version)
        self.next_step += 1
        return weights

    def _streams(
        self, kind: Any, gradient: npt.ArrayLike, sample_count: int
    ) -> Iterator[tuple[int, list[Any]]]:
        for slice_ in self.slices:
            if slice_.size:
                index = slice_.shard_index
                yield (
                    index,
                    self.gradient_messages(kind, index, gradient, sample_count=sample_count),
                )

    def take(self, slice_: WireSlice, answers: Any, weights: Float32, min_version: int) -> None:
        """Reads the slice's chunks, in order, into `weights`."""
        expected = list(slice_.chunks())
        for (index, start, stop), answer in zip(expected, answers, strict=True):
            chunk = answer.chunk
            assert (chunk.chunk_index, chunk.element_offset) == (index, start)
            assert chunk.element_count == stop - start
            assert wire_crc.fits(answer, wire_crc.WEIGHTS, self.spec.name)
            assert answer.version >= min_version
            assert not chunk.lz4 or self.spec.compression == types.COMPRESSION_LZ4
            block = block_of(self.spec.size)
            weights[start:stop] = decode(answer.payload, self.spec.codec, block, stop - start)


def _chunk(index: int, offset: int, count: int) -> types.Chunk:
    return types.Chunk(
        chunk_index=index,
        element_offset=offset,
        element_count=count,
    )
