"""`shardwell plan`: which layout suits a job, before any of it runs. Calls no shard; computes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import click
from rich.table import Table

from shardwell.errors import ArgumentError
from shardwell.group.schedule.strategies import ARITY_MAX
from shardwell.numerics.codec import CODECS
from shardwell.specs.optimizers import OF_PARAMETERS, SGD, Average, Optimizer
from shardwell_server.cli.options import as_fields, json_option, option, usage_errors
from shardwell_server.cli.quantities import (
    Duration,
    ModelSize,
    Rate,
    bytes_words,
    digits,
    link_words,
    seconds_words,
)
from shardwell_server.operations import outer_time, step_time
from shardwell_server.operations.outer_time import OuterJob, OuterTime
from shardwell_server.operations.step_time import Job, StepTime
from shardwell_server.terminal import console, table

_OPTIMIZERS: dict[str, Optimizer] = {
    "momentum": SGD(0.1, momentum=0.9),
    **{
        kind.__name__.lower(): kind() if kind is Average else kind(lr=0.1) for kind in OF_PARAMETERS
    },
}
"""The optimizers by name; their rates have no effect here."""
_LEGEND = (
    "a link: what the fullest one carries in its fuller direction; exchange: from gradients to "
    "weights; overlap: a step whose gradients leave during the backward pass; a shard: "
    "its weights, sums and optimizer state; a worker: that state, where it keeps its own."
)
_OUTER_LEGEND = (
    "a fragment: from its offer to its new weights; hidden: the part of that in which the learner "
    "computes; step: an inner step, waits included; synchronous: a step as {codec} that overlaps "
    "its backward pass; faster: steps in the time of a synchronous one; mean, peak: Mbit/s that a "
    "learner sends, and receives as well, over an outer step and while a fragment travels."
)
_TIMES = ("communication_s", "step_s", "overlapped_s", "limit")
_LINK_BYTES_PER_S = 125e6
_SLOW_LINKS = (125e6, 12.5e6, 6.25e6, 1.25e6)
_CODEC = "fp16"
_WORTH = 1.1
"""A layout that takes more machines, or gives up the server, is to be so many times as fast."""


@click.command()
@click.argument("element_count", metavar="SIZE", type=ModelSize())
@option("--workers", "Machines with a worker.", int, name="worker_count", default=4)
@option("--shard-count", "Shards; default: as many as workers.", int)
@option(
    "--link",
    "What each machine's link carries, in either direction.",
    Rate(),
    show_default="1Gbit/s; with --outer: 1000, 100, 50 and 10 Mbit/s",
)
@option(
    "--codec",
    "How gradients and weights travel.",
    click.Choice(sorted(CODECS)),
    show_default="fp16; with --outer: int8",
)
@option("--compute-s", "Forward and backward pass of a step.", Duration(0.0), default=0.0)
@option(
    "--optimizer",
    "Whose state is to be kept (adam: AdamW as well).",
    click.Choice(list(_OPTIMIZERS)),
    default="adam",
)
@option("--arity", "Children of a rank in the tree.", click.IntRange(1, ARITY_MAX), default=2)
@option("--latency-s", "A small message and back.", Duration(0.0), default=step_time.LATENCY_S)
@option(
    "--host-rate",
    "Float32 that a worker and its shard exchange where no link is in the way; `shardwell bench` "
    "measures it.",
    Rate(),
    name="host_bytes_per_s",
    default=step_time.HOST_BYTES_PER_S,
    show_default=f"{step_time.HOST_BYTES_PER_S / 1e9:g}GB/s",
)
@option(
    "--outer",
    "Outer training (DiLoCo) beside synchronous steps: learners send once in so many inner "
    "steps, each of which takes --compute-s.",
    click.IntRange(min=1),
    name="sync_every",
    metavar="STEPS",
)
@option(
    "--fragments",
    "With --outer: parts of the model, which are sent in turn.",
    click.IntRange(min=1),
    name="fragment_count",
    show_default=f"{outer_time.FRAGMENT_COUNT}",
)
@option(
    "--overlap",
    "With --outer: inner steps between a fragment's offer and its result.",
    click.IntRange(min=0),
    show_default=f"{outer_time.OVERLAP}, or what the fragments leave room for",
)
@json_option
def plan(
    *,
    shard_count: int | None,
    link: float | None,
    codec: str | None,
    optimizer: str,
    arity: int,
    as_json: bool,
    sync_every: int | None,
    **given: Any,
) -> None:
    """Predict the step time of a model of SIZE by layout, and recommend one.

    SIZE is a number of elements (650, 100M, 7B) or bytes of float32 (64MB, 28GiB). With --outer,
    say what slow links would carry and hide of outer training.
    """
    fragment_count, overlap = given.pop("fragment_count"), given.pop("overlap")
    with usage_errors():
        job = Job(
            shard_count=given["worker_count"] if shard_count is None else shard_count,
            link_bytes_per_s=_LINK_BYTES_PER_S if link is None else link,
            codec=_CODEC if codec is None or sync_every is not None else codec,
            optimizer=_OPTIMIZERS[optimizer],
            **given,
        )
        if sync_every is not None:
            outer = _outer_job(job, sync_every, fragment_count, overlap, codec)
            _show_outer(outer, _SLOW_LINKS if link is None else (link,), as_json=as_json)
            return
        if fragment_count is not None or overlap is not None:
            raise ArgumentError("--fragments and --overlap say how --outer sends; give --outer")
        layouts = step_time.layouts(job, arity)
    chosen, reason = recommended(layouts)
    least_s = step_time.least_link_s(job)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "layouts": [as_fields(one, *_TIMES) for one in layouts],
                    "recommended": chosen.layout,
                    "reason": reason,
                    "least_link_s": least_s,
                }
            )
        )
        return
    screen = console()
    screen.print(_words(job), markup=False)
    screen.print(_layout_table(layouts, chosen))
    screen.print(_LEGEND, markup=False)
    screen.print(f"Take {chosen.layout}: {reason}.", markup=False)
    if chosen.limit == "cpu":
        screen.print(
            "Not links but processors are the limit: --host-rate "
            f"{job.host_bytes_per_s / 1e9:g}GB/s of float32; `shardwell bench` measures yours.",
            markup=False,
        )
    if least_s > 0:
        screen.print(_least(job, least_s), markup=False)
    if chosen.limit == "link":
        screen.print("Links are the limit: --outer 100 shows what outer training makes of them.")


def recommended(layouts: list[StepTime]) -> tuple[StepTime, str]:
    """Returns the layout to take, and the reason.

    The fastest step, overlapped; but shards beside workers where nothing is a tenth faster, since a
    worker may die there and the optimizer's state is split; dedicated machines only if worth it.
    """
    by_name = {one.layout: one for one in layouts}
    server, dedicated = by_name["co-located"], by_name["dedicated"]
    groups = [one for one in layouts if one not in (server, dedicated)]
    group = min(groups, key=lambda one: one.overlapped_s, default=None)
    if group is not None and group.machine_count == 1:
        return group, "a single worker has no peer to exchange with; nothing needs to run beside it"
    is_faster = group is not None and group.overlapped_s * _WORTH < server.overlapped_s
    best = group if group is not None and is_faster else server
    gain = best.overlapped_s / dedicated.overlapped_s
    if gain > _WORTH:
        spare_count = dedicated.machine_count - best.machine_count
        return dedicated, (
            f"its step takes {seconds_words(dedicated.overlapped_s)} overlapped, {gain:.1f} times "
            f"as fast as {best.layout}, for {spare_count} more machine{'s' * (spare_count > 1)}"
        )
    if group is None:
        return server, "groups lack this codec; no machine more, and workers may come, go and die"
    if best is group:
        return group, (
            f"its step takes {seconds_words(group.overlapped_s)} overlapped, "
            f"{server.overlapped_s / group.overlapped_s:.1f} times as fast as co-located shards; "
            "but all ranks are needed at each step"
        )
    if math.isclose(server.overlapped_s, group.overlapped_s, rel_tol=0.02):
        compared = f"as fast as {group.layout}"
    elif server.overlapped_s < group.overlapped_s:
        compared = f"{group.overlapped_s / server.overlapped_s:.1f} times as fast as {group.layout}"
    else:
        compared = f"within a tenth of {group.layout}"
    state = ", and the optimizer's state is split over the shards"
    return server, (
        f"{compared}, needs no machine more, and workers may come, go and die"
        f"{state if group.worker_state_bytes else ''}"
    )


def _words(job: Job) -> str:
    return (
        f"{job.element_count:,} elements: {bytes_words(job.float32_bytes)} of float32, "
        f"{bytes_words(job.encoded_bytes)} as {job.codec}; {job.worker_count} workers, "
        f"{job.shard_count} shards, links of {link_words(job.link_bytes_per_s)}, computing "
        f"{seconds_words(job.compute_s)} a step"
    )


def _layout_table(layouts: list[StepTime], chosen: StepTime) -> Table:
    shown = table(
        "", "layout", ">a link", ">exchange", ">step", ">overlap", "limit", ">a shard", ">a worker"
    )
    for one in layouts:
        name = f"[bold green]{one.layout}[/bold green]" if one is chosen else one.layout
        shown.add_row(
            name,
            bytes_words(one.link_bytes),
            seconds_words(one.communication_s),
            seconds_words(one.step_s),
            seconds_words(one.overlapped_s),
            one.limit,
            bytes_words(one.shard_bytes) if one.shard_bytes else "-",
            bytes_words(one.worker_state_bytes) if one.worker_state_bytes else "-",
        )
    return shown


def _least(job: Job, least_s: float) -> str:
    spare_count = min(job.shard_count, job.worker_count)
    return (
        f"On {job.worker_count} + {spare_count} machines these links need at least "
        f"{seconds_words(least_s)} a step, wherever sums are taken (BytePS, OSDI 2020)."
    )


def _outer_job(
    job: Job,
    sync_every: int,
    fragment_count: int | None,
    overlap: int | None,
    codec: str | None,
) -> OuterJob:
    count = outer_time.FRAGMENT_COUNT if fragment_count is None else fragment_count
    room = max(sync_every // count - 1, 0)
    return OuterJob(
        job=job,
        sync_every=sync_every,
        fragment_count=count,
        overlap=min(outer_time.OVERLAP, room) if overlap is None else overlap,
        codec=outer_time.CODEC if codec is None else codec,
    )


def _show_outer(outer: OuterJob, links: Sequence[float], *, as_json: bool) -> None:
    times = [outer_time.outer_time(outer, link) for link in links]
    if as_json:
        click.echo(json.dumps(_outer_fields(outer, times)))
        return
    screen = console()
    screen.print(_outer_words(outer), markup=False)
    screen.print(_link_table(times))
    screen.print(_OUTER_LEGEND.format(codec=outer.job.codec), markup=False)
    screen.print(_hiding(outer), markup=False)


def _outer_fields(outer: OuterJob, times: list[OuterTime]) -> dict[str, object]:
    told = ("sync_every", "fragment_count", "overlap", "codec")
    bounds = ("synchronous_bytes", "hiding_bytes_per_s")
    return {
        **{name: getattr(outer, name) for name in told},
        "sent_bytes": outer.encoded_bytes,
        "received_bytes": outer.encoded_bytes,
        **{name: getattr(outer, name) for name in bounds},
        "links": [as_fields(one, "hidden_share", "gain") for one in times],
    }


def _outer_words(outer: OuterJob) -> str:
    job, interval = outer.job, outer.schedule.interval
    return (
        f"{job.element_count:,} elements, {job.worker_count} learners, {job.shard_count} dedicated "
        f"shards. An outer step is {outer.sync_every} inner steps of "
        f"{seconds_words(job.compute_s)}, with {outer.fragment_count} fragments: one is due every "
        f"{interval} inner steps, and leaves {outer.overlap} before. In an outer step a learner "
        f"sends {bytes_words(outer.encoded_bytes)} as {outer.codec} and receives as much; as many "
        f"synchronous steps as {job.codec} send {bytes_words(outer.synchronous_bytes)}, "
        f"{digits(outer.synchronous_bytes / outer.encoded_bytes)} times as much."
    )


def _link_table(times: list[OuterTime]) -> Table:
    shown = table(
        "", ">Mbit/s", ">a fragment", ">hidden", ">step", ">synchronous", ">faster", ">mean",
        ">peak",
    )  # fmt: skip
    for one in times:
        shown.add_row(
            _mbit_words(one.link_bytes_per_s),
            seconds_words(one.fragment_s),
            f"{one.hidden_share:.0%}",
            seconds_words(one.inner_step_s),
            seconds_words(one.synchronous_step_s),
            digits(one.gain),
            _mbit_words(one.mean_bytes_per_s),
            _mbit_words(one.peak_bytes_per_s),
        )
    return shown


def _mbit_words(bytes_per_s: float) -> str:
    return digits(bytes_per_s * 8 / 1e6)


def _hiding(outer: OuterJob) -> str:
    rate = outer.hiding_bytes_per_s
    if rate is not None:
        return f"Links of {link_words(rate)} hide all of it."
    if outer.job.compute_s == 0.0:
        return "Give --compute-s, the time of an inner step: without, there is nothing to hide in."
    if outer.overlap == 0:
        return "Nothing is hidden without --overlap: learners wait for each fragment."
    return "No link hides all of it: raise --overlap, or send more fragments."
