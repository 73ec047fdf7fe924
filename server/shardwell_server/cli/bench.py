"""`shardwell bench`: a cluster as one worker sees it, and what a step there waits for.

It measures parameters of its own, asynchronous, so that no worker waits for another, and deletes
them at its end, also when a signal breaks it off.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import click
import numpy as np
from rich.table import Table

import shardwell
from shardwell.connection.credentials import Credentials
from shardwell.errors import ShardwellError, UnknownParameterError
from shardwell.numerics.codec import CODECS, Float32
from shardwell.parameter.parameter import Parameter, SliceProbe
from shardwell.process.environment import host_name
from shardwell.rpc.session import unique_worker_id
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.names import parse_target
from shardwell.specs.parameter import CodecName
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES
from shardwell_server.cli.options import (
    as_fields,
    connected,
    json_option,
    option,
    shards_option,
    timeout_option,
)
from shardwell_server.cli.quantities import Duration, Rate, bytes_words, digits, seconds_words
from shardwell_server.operations.step_time import HEADER_FACTOR
from shardwell_server.terminal import console, table

MEGABYTES_MAX = 1024
"""Most MB of the parameter: this process holds it twice, the shards together four times."""
_CALL_COUNT = 50
_WARM_UP_COUNT = 5
_DELETE_S = 10.0
_ROUND_COUNT_MAX = 50
_CODEC_S = 0.1
_CODECS: tuple[CodecName, CodecName] = ("fp16", "fp32")
"""Two that differ in bytes, which separates the cost of bytes from that of elements."""
_LOCK_PAUSE_S, _LOCK_REST_S, _LOCK_REST_COUNT_MIN = 0.0005, 0.2, 40
"""The pause between samples of the interpreter's lock; the look at a process at rest, and its
samples."""
_VISIBLE = 1.25
"""A link shows when twice the bytes take at least so many times as long."""


@dataclass(kw_only=True)
class ShardFigures:
    """The measurements of one shard."""

    shard_index: int
    address: str
    transport: str
    round_trip_s: float
    slice_size: int
    out_s: dict[str, float] = field(default_factory=dict)
    """The median time of a counted gradient of the slice, by codec."""
    in_s: dict[str, float] = field(default_factory=dict)

    @property
    def link_out_bytes_per_s(self) -> float | None:
        """The rate of the way there; None where processing hides it."""
        return _link_rate(self.slice_size, self.out_s)

    @property
    def link_in_bytes_per_s(self) -> float | None:
        """The rate of the way back; None where processing hides it."""
        return _link_rate(self.slice_size, self.in_s)


@dataclass(kw_only=True)
class StepFigures:
    """The parts of the time of an exchange with all shards."""

    exchange_s: float
    link_s: float
    fill_s: float
    """The time of the first chunks, while the other direction has nothing to carry yet."""
    codec_s: float
    """This worker's conversions, on one thread."""
    latency_s: float
    lock_share: float
    """Part of the exchange for which some thread of this process held the interpreter's lock."""

    @property
    def shard_s(self) -> float:
        """The rest: shards that check, sum and update, and the transport of messages."""
        return max(self.exchange_s - self.bound_s - self.codec_s - self.latency_s, 0.0)

    @property
    def bound_s(self) -> float:
        """The time that the link needs: no exchange over it is faster."""
        return self.link_s + self.fill_s

    @property
    def limit(self) -> str:
        """The part that takes the most."""
        parts = {
            "link": self.bound_s,
            "codec": self.codec_s,
            "latency": self.latency_s,
            "shards": self.shard_s,
        }
        return max(parts, key=lambda name: parts[name])


def _settled(times: Sequence[float]) -> float:
    return statistics.median(times[1:] or times)


@click.command()
@shards_option
@option(
    "--megabytes",
    "Float32 of the parameter that is moved; over slow links, give less.",
    click.IntRange(1, MEGABYTES_MAX),
    default=32,
)
@option(
    "--seconds",
    "How long to move it; each kind of transfer at least once.",
    Duration(),
    default=5.0,
)
@option(
    "--link",
    "What this machine's link carries, as 1Gbit/s, to compare with; default: what is seen.",
    Rate(),
)
@json_option
@timeout_option(120.0)
def bench(
    *,
    target: str,
    megabytes: int,
    seconds: float,
    link: float | None,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Measure a cluster from here: latency, throughput, codecs, and what limits a step.

    Uses parameters of its own, shardwell-bench-..., which it deletes at its end. Shards that train
    meanwhile do so more slowly, and slow this down.
    """
    deadline_s = time.monotonic() + timeout_s
    with connected("bench", target, timeout_s, worker_id=unique_worker_id()) as (client, _):
        cluster_id = client.cluster_id
        addresses = parse_target(target)
        round_trips = [_round_trip_s(*shard, deadline_s) for shard in enumerate(addresses)]
        work = _Transfers(client, megabytes, deadline_s)
        try:
            work.make()
            transports = work.transports()
            shards = [
                ShardFigures(
                    shard_index=index,
                    address=address,
                    transport=transports[index],
                    round_trip_s=round_trips[index],
                    slice_size=work.slice_size(index),
                )
                for index, address in enumerate(addresses)
            ]
            exchange_s, lock_share = work.measure(seconds, shards)
        finally:
            left = work.delete()
    codecs = {name: _codec_rates(name) for name in CODECS}
    step = _step(shards, exchange_s, codecs["fp16"].values(), link, lock_share)
    if as_json:
        figures = {
            "cluster_id": cluster_id,
            "megabytes": megabytes,
            "shards": [as_fields(shard, *_LINK_RATES) for shard in shards],
            "codecs": {
                name: {f"{way}_bytes_per_s": rate for way, rate in rates.items()}
                for name, rates in codecs.items()
            },
            "step": as_fields(step, "bound_s", "shard_s", "limit"),
            "left_parameters": left,
        }
        click.echo(json.dumps(figures))
        return
    screen = console()
    screen.print(
        f"cluster {cluster_id}, seen from {host_name()}: {megabytes} MB of float32 in "
        f"slices of {bytes_words(4 * shards[0].slice_size)}",
        markup=False,
    )
    screen.print(_shard_table(shards))
    screen.print(_LEGEND, markup=False)
    screen.print(_codec_table(codecs))
    for line in _conclusion(step, megabytes, shards, link):
        screen.print(line, markup=False)
    if left:
        screen.print(f"Left on the shards: {'; '.join(left)}", style="yellow", markup=False)


class _Transfers:
    def __init__(self, client: shardwell.Client, megabytes: int, deadline_s: float) -> None:
        self._client = client
        self._deadline_s = deadline_s
        size = megabytes * 10**6 // 4
        self._values = _values(size)
        self._out = np.zeros(size, np.float32)
        # Another bench may run beside this one, and delete its own.
        own = secrets.token_hex(4)
        self._names = {codec: f"shardwell-bench-{own}-{megabytes}MB-{codec}" for codec in _CODECS}
        self._whole: dict[str, Parameter[Any]] = {}

    def make(self) -> None:
        for codec, name in self._names.items():
            model = self._client.parameter(
                name,
                size=self._values.size,
                optimizer=shardwell.Average(),
                codec=codec,
                mode="async",
            )
            model.init(self._out, timeout_s=self._rest_s())
            self._whole[codec] = model

    def delete(self) -> list[str]:
        left = []
        for name in self._names.values():
            try:
                self._client.delete(name, timeout_s=_DELETE_S)
            except UnknownParameterError:
                pass  # it came to an end before that one was made
            except ShardwellError as error:
                left.append(f"{name} ({error.message})")
        return left

    def slice_size(self, shard_index: int) -> int:
        return self._whole[_CODECS[0]].slices[shard_index].size

    def transports(self) -> list[str]:
        found = []
        for probe in self._probes("fp16"):
            self._timed(probe.exchange, self._values, out=self._out)
            traffic = probe.traffic
            share = traffic.shared_bytes / (traffic.sent_bytes + traffic.received_bytes)
            found.append("gRPC" if share < 0.01 else "memory" if share > 0.9 else "both")
        self._whole["fp16"].next_step += 1
        return found

    def measure(self, seconds: float, shards: list[ShardFigures]) -> tuple[float, float]:
        """Returns seconds of an exchange, and the part for which Python's lock was held."""
        exchanges: list[float] = []
        times: dict[str, list[list[float]]] = {}
        probes: dict[str, list[SliceProbe]] = {codec: self._probes(codec) for codec in _CODECS}
        until_s = time.monotonic() + seconds
        with LockSamples() as samples:
            while not exchanges or (
                len(exchanges) < _ROUND_COUNT_MAX and time.monotonic() < until_s
            ):
                for codec, whole in self._whole.items():
                    for probe in probes[codec]:
                        probe.next_step = whole.next_step
                        out_s = self._timed(probe.put_gradient, self._values)
                        in_s = self._timed(probe.get_weights, out=self._out)
                        times.setdefault(codec, []).append([out_s, in_s])
                    whole.next_step += 1
                whole = self._whole["fp16"]
                with samples.taken():
                    exchanges.append(self._timed(whole.exchange, self._values, out=self._out))
        for codec, seen in times.items():
            for index, shard in enumerate(shards):
                out, in_ = zip(*seen[index :: len(shards)], strict=True)
                shard.out_s[codec], shard.in_s[codec] = _settled(out), _settled(in_)
        return _settled(exchanges), samples.share

    def _probes(self, codec: str) -> list[SliceProbe]:
        whole = self._whole[codec]
        return [SliceProbe(whole, index) for index in range(self._client.shard_count)]

    def _timed(self, verb: Callable[..., Any], *values: Any, **more: Any) -> float:
        timeout_s = self._rest_s()
        began_s = time.perf_counter()
        verb(*values, timeout_s=timeout_s, **more)
        return time.perf_counter() - began_s

    def _rest_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.05)


class LockSamples:
    """Samples the part of a time for which threads of this process hold the interpreter's lock.

    A thread sleeps for a moment, again and again. Where it wakes later than in a process at rest,
    another thread had the lock. Native code and system calls that release the lock do not count. A
    context manager, which begins with a look at the process at rest.
    """

    def __init__(self) -> None:
        self._rest: list[float] = []
        self._busy: list[float] = []
        self._into: list[float] | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._sample, name="lock-samples", daemon=True)

    def __enter__(self) -> Self:
        self._into = self._rest
        self._thread.start()
        time.sleep(_LOCK_REST_S)
        self._into = None
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Samples the block, too."""
        self._into = self._busy
        try:
            yield
        finally:
            self._into = None

    @property
    def share(self) -> float:
        """The part of samples in the blocks at which the lock was held; 0 without any."""
        if not self._busy or len(self._rest) < _LOCK_REST_COUNT_MIN:
            return 0.0
        usual_s = statistics.quantiles(self._rest, n=20, method="inclusive")[-1]
        late = sum(late_s > usual_s for late_s in self._busy) / len(self._busy)
        return max(late - 0.05, 0.0) / 0.95  # one in twenty is later at rest, too

    def _sample(self) -> None:
        while not self._is_over:
            into, began_s = self._into, time.perf_counter()
            time.sleep(_LOCK_PAUSE_S)
            late_s = time.perf_counter() - began_s - _LOCK_PAUSE_S
            if into is not None and into is self._into:
                into.append(late_s)


def _values(size: int) -> Float32:
    return np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(0.01)


def _round_trip_s(index: int, address: str, deadline_s: float) -> float:
    channel = ShardChannel(index, address, credentials=Credentials.of())
    question = pb.GetStatusRequest(identity_only=True)
    times = []
    try:
        for number in range(_WARM_UP_COUNT + _CALL_COUNT):
            timeout_s = max(deadline_s - time.monotonic(), 0.05)
            began_s = time.perf_counter()
            channel.call("GetStatus", question, pb.GetStatusResponse, timeout_s=timeout_s)
            if number >= _WARM_UP_COUNT:
                times.append(time.perf_counter() - began_s)
    finally:
        channel.close()
    return statistics.median(times)


def _codec_rates(name: str) -> dict[str, float]:
    codec = CODECS[name]
    chunk_size = PAYLOAD_SIZE_MAX_BYTES // codec.item_size
    values = _values(16 * chunk_size).reshape(16, chunk_size)
    payloads = np.empty((16, codec.encoded_bytes(chunk_size)), np.uint8)
    ways: dict[str, tuple[Callable[[Any, Any], object], Any, Any]] = {
        "encode": (codec.encode, values, payloads),
        "decode": (codec.decode, payloads, values),
    }
    rates = {}
    for way, (convert, source, target) in ways.items():
        times: list[float] = []
        until_s = time.perf_counter() + _CODEC_S
        while len(times) < 3 or time.perf_counter() < until_s:
            began_s = time.perf_counter()
            for read, written in zip(source, target, strict=True):
                convert(read, written)
            times.append(time.perf_counter() - began_s)
        rates[way] = values.nbytes / statistics.median(times)
    return rates


def _link_rate(slice_size: int, seconds: dict[str, float]) -> float | None:
    """Returns the rate that fits two codecs; None: the time hardly depends on the bytes.

    time = elements x (time to convert, check and sum one) + bytes / rate.
    """
    few_s, many_s = seconds["fp16"], seconds["fp32"]
    if many_s < _VISIBLE * few_s:
        return None
    more_bytes = slice_size * (CODECS["fp32"].item_size - CODECS["fp16"].item_size)
    return more_bytes * HEADER_FACTOR / (many_s - few_s)


def _step(
    shards: Sequence[ShardFigures],
    exchange_s: float,
    codec_rates: Iterable[float],
    link: float | None,
    lock_share: float = 0.0,
) -> StepFigures:
    sent = [shard for shard in shards if shard.transport != "memory"]
    item_size = CODECS["fp16"].item_size * HEADER_FACTOR
    byte_count = sum(shard.slice_size for shard in sent) * item_size
    link_s = 0.0 if link is None else byte_count / link
    for name in _LINK_RATES if link is None else ():
        seen = [(shard.slice_size * item_size, getattr(shard, name)) for shard in sent]
        seen = [(bytes_there, rate) for bytes_there, rate in seen if rate is not None]
        if seen:
            # This machine's link carries what goes to all shards, and at least what the best takes.
            all_s = byte_count / max(rate for _, rate in seen)
            link_s = max(link_s, all_s, *(bytes_there / rate for bytes_there, rate in seen))
    float32_bytes = sum(4 * shard.slice_size for shard in shards)
    slice_bytes = CODECS["fp16"].item_size * shards[0].slice_size
    if link is None:
        link_s = min(link_s, exchange_s)
    return StepFigures(
        exchange_s=exchange_s,
        link_s=link_s,
        fill_s=link_s * min(PAYLOAD_SIZE_MAX_BYTES / slice_bytes, 1.0),
        codec_s=sum(float32_bytes / rate for rate in codec_rates),
        latency_s=max(shard.round_trip_s for shard in shards),
        lock_share=lock_share,
    )


_LINK_RATES = ("link_out_bytes_per_s", "link_in_bytes_per_s")


def _shard_table(shards: Sequence[ShardFigures]) -> Table:
    shown = table(
        "", ">shard", "address", "via", ">round trip", ">out", ">in", ">link out", ">link in"
    )
    for shard in shards:
        float32_gigabytes = 4 * shard.slice_size / 1e9
        shown.add_row(
            str(shard.shard_index),
            shard.address,
            shard.transport,
            seconds_words(shard.round_trip_s),
            digits(float32_gigabytes / shard.out_s["fp16"]),
            digits(float32_gigabytes / shard.in_s["fp16"]),
            _link_cell(shard, shard.link_out_bytes_per_s),
            _link_cell(shard, shard.link_in_bytes_per_s),
        )
    return shown


def _link_cell(shard: ShardFigures, rate: float | None) -> str:
    if shard.transport == "memory":
        return "none"
    return "not seen" if rate is None else digits(rate * 8 / 1e9)


def _gigabytes(bytes_per_s: float) -> str:
    return f"{digits(bytes_per_s / 1e9)} GB/s"


def _codec_table(codecs: dict[str, dict[str, float]]) -> Table:
    shown = table("", "codec, one thread here", *(f">{name}" for name in codecs))
    for way in ("encode", "decode"):
        shown.add_row(way, *(_gigabytes(rates[way]) for rates in codecs.values()))
    return shown


_LEGEND = (
    "out, in: GB/s of float32, a gradient and weights as fp16; link: Gbit/s, found from fp16 and "
    "fp32, which differ in bytes alone (not seen: bytes hardly cost time)."
)
_LIMITS = {
    "link": "the link: a codec of fewer bytes, or more shards if theirs is the narrow one",
    "codec": "converting on this machine",
    "latency": "latency: exchange more at a time, or fewer parameters",
    "shards": "the shards, and what carries messages to them",
}


def _conclusion(
    step: StepFigures, megabytes: int, shards: Sequence[ShardFigures], link: float | None
) -> Iterator[str]:
    rate = megabytes * 1e6 / step.exchange_s
    yield (
        f"exchange of {megabytes} MB as fp16 with all shards: {seconds_words(step.exchange_s)}, "
        f"{_gigabytes(rate)}"
    )
    yield (
        f"  of it link {seconds_words(step.link_s)}, "
        f"its first chunks {seconds_words(step.fill_s)}, codec {seconds_words(step.codec_s)}, "
        f"latency {seconds_words(step.latency_s)}, shards and "
        f"the rest {seconds_words(step.shard_s)}"
    )
    yield (
        f"  Python's own lock was held for {step.lock_share:.0%} of it (sampled), which more "
        "threads do not shorten"
    )
    yield f"  limited by {_LIMITS[step.limit]}"
    if step.link_s:
        source = "given" if link is not None else "as seen"
        yield (
            f"  bound of the link, {source}: {seconds_words(step.bound_s)}; "
            f"{step.bound_s / step.exchange_s:.0%} of it is reached"
        )
    rates = [shard.link_out_bytes_per_s for shard in shards if shard.transport != "memory"]
    seen = max((rate for rate in rates if rate is not None), default=link)
    words = f"shardwell plan {megabytes}MB --shard-count {len(shards)}"
    if seen is not None:
        words += f" --link {seen * 8 / 1e6:.0f}Mbit/s"
    if step.limit != "link":  # else it says nothing of the machines
        words += f" --host-rate {rate / 1e9:.2g}GB/s"
    yield f"for other sizes and numbers of workers: {words} --workers N"
