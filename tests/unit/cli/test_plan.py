"""What `shardwell plan` recommends, and that its table fits 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardwell.specs.optimizers import AdamW
from shardwell_server.cli.plan import _layout_table, _link_table, recommended
from shardwell_server.operations import step_time
from shardwell_server.operations.outer_time import OuterJob, outer_time
from shardwell_server.operations.step_time import Job


def _job(**changes: object) -> Job:
    given = {
        "element_count": 16_000_000,
        "worker_count": 4,
        "shard_count": 4,
        "link_bytes_per_s": 125e6,
        "optimizer": AdamW(0.1),
    }
    return Job(**{**given, **changes})  # type: ignore[arg-type]


def _layouts(**changes: object) -> list[step_time.StepTime]:
    return step_time.layouts(_job(**changes))


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"worker_count": 2, "shard_count": 2}, "co-located", "needs no machine more"),
        ({"worker_count": 1, "shard_count": 1}, "ring", "no peer to exchange with"),
        ({"worker_count": 32, "shard_count": 1}, "ring", "all ranks are needed"),
        ({"compute_s": 60.0}, "co-located", "as fast as"),
        (
            {"worker_count": 4, "shard_count": 8, "host_bytes_per_s": 1e6},
            "dedicated",
            "8 more machines",
        ),
        ({"codec": "int8"}, "co-located", "groups lack this codec"),
    ],
)
def test_what_is_recommended(changes, layout, words) -> None:
    chosen, reason = recommended(_layouts(**changes))
    assert chosen.layout == layout, reason
    assert words in reason


@pytest.mark.parametrize("element_count", [1, 16_000_000, 7 * 10**9, 2**48])
@pytest.mark.parametrize("compute_s", [0.0, 123.0])
def test_layouts_fit_80_columns(element_count, compute_s) -> None:
    layouts = _layouts(element_count=element_count, compute_s=compute_s)
    screen = Console(width=80, file=io.StringIO(), record=True)
    screen.print(_layout_table(layouts, layouts[0]))
    lines = [line for line in screen.export_text().splitlines() if line.strip()]
    assert len(lines) == 2 + len(layouts)  # none is folded
    for line, one in zip(lines[2:], layouts, strict=True):
        assert line.split()[0] == one.layout


@pytest.mark.parametrize("element_count", [4, 25_000_000, 7 * 10**9, 2**48])
@pytest.mark.parametrize("compute_s", [0.0, 123.0])
def test_links_fit_80_columns(element_count, compute_s) -> None:
    outer = OuterJob(job=_job(element_count=element_count, compute_s=compute_s), sync_every=100)
    times = [outer_time(outer, rate) for rate in (125e6, 12.5e6, 6.25e6, 1.25e6)]
    screen = Console(width=80, file=io.StringIO(), record=True)
    screen.print(_link_table(times))
    lines = [line for line in screen.export_text().splitlines() if line.strip()]
    assert len(lines) == 2 + len(times)  # none is folded
    assert [line.split()[0] for line in lines[2:]] == ["1,000", "100", "50.0", "10.0"]
