"""Goal: the status page shows a cluster in a real browser, light and dark, on a desk and a phone.

Method: one cluster at work and one Chromium for all tests; what the page shows is compared with
what was done. `SHARDWELL_TEST_PICTURES=1` writes the pictures of docs/operations.md anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pytest

import shardwell
from harness.browser import Browser, Page, with_palette
from harness.polling import eventually
from harness.programs.commands import Program, ServingShard
from harness.programs.ports import free_port
from harness.required import program
from harness.tokens import Tokens
from shardwell.rpc import session
from shardwell_server import LocalCluster

pytestmark = pytest.mark.browser
SCENE = Path(__file__).parents[2] / "harness" / "programs" / "page_scene.py"
IMAGES = Path(__file__).parents[3] / "docs" / "images"
WRITES_PICTURES = bool(os.environ.get("SHARDWELL_TEST_PICTURES"))
PICTURED_SAMPLE_COUNT = 24
PICTURE_BYTES_MAX = 120_000
POINTS = (
    "(document.querySelector('#parameters svg polyline')?.getAttribute('points') ?? '')"
    ".split(' ').length"
)
COUNTED = "ask('history.json').then(found => found.ages_s.length)"
PHONE = {"width": 390, "height": 844}
BAD = "<img src=x onerror=document.title=1>"


class Scene(NamedTuple):
    """A cluster whose step 40 of `net` lacks w2, while `encoder` is trained."""

    url: str
    target: str
    pid: int
    """Of the process of w0, w1 and w2."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Scene]:
    del browser  # without one no cluster is needed
    ports = [free_port() for _ in range(2)]
    target = ",".join(f"127.0.0.1:{port}" for port in ports)
    data_dir = tmp_path_factory.mktemp("shards")
    with contextlib.ExitStack() as stack:
        shards = [
            stack.enter_context(
                ServingShard(
                    "--admin-listen=127.0.0.1:0",
                    "--cluster-id=training",
                    "--abandoned-after-s=0.2",
                    f"--cluster={target}",
                    f"--data-dir={data_dir / str(index)}",
                    index=index,
                    count=2,
                    port=port,
                )
            )
            for index, port in enumerate(ports)
        ]
        for shard in shards:
            shard.address()
        url = shards[0].read_line().removeprefix("status page: ")
        workers = stack.enter_context(Program(str(SCENE), target, stdin=subprocess.PIPE))
        assert workers.read_line() == "ready"
        yield Scene(url, target, workers.pid)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = program("chromium")
    started = Browser(chromium, tmp_path_factory.mktemp("chromium"))
    try:
        yield started
    finally:
        started.close()


def is_live(page: Page) -> None:
    """Returns when the page shows what the cluster does now."""
    page.shows("#when", lambda text: text == "live")
    page.shows("#waits", lambda text: "has waited" in text)


def check_clean(page: Page, url: str) -> None:
    """Nothing failed, and no other host was asked."""
    assert page.errors == []
    assert all(each.startswith(url) for each in page.asked), page.asked


def keep(browser: Browser, page: Page, name: str, height: int) -> None:
    """Writes a picture for the docs, where it is wanted; the docs have it in any case."""
    file = IMAGES / f"{name}.png"
    if WRITES_PICTURES:
        has_samples = f"{COUNTED}.then(count => count >= {PICTURED_SAMPLE_COUNT})"
        eventually("two minutes have passed", lambda: page.run(has_samples), timeout_s=300)
        page.run("look_back()")  # which shows them
        page.eventually("the last minute has a line", f"{POINTS} >= 12")
        picture = page.picture(height=height)
        with browser.page("about:blank") as blank:
            file.write_bytes(with_palette(blank, picture))
    assert file.stat().st_size < PICTURE_BYTES_MAX


def column(page: Page, table: str, label: str) -> list[str]:
    """What a column shows, from above."""
    found: Any = page.run(
        f"[...document.querySelectorAll('#{table} td[data-label=\"{label}\"]')]"
        ".map(each => each.innerText)"
    )
    return list(found)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_on_a_desk(scene, browser, is_dark) -> None:
    with browser.page(scene.url, is_dark=is_dark) as page:
        is_live(page)
        page.shows("#waits", lambda text: "step 40 of parameter 'net' has waited" in text)
        assert "for 'w2' (process" in page.text("#waits")
        # What works comes first, what died after it, and what has ended is folded.
        eventually(
            "the dead one is known",
            lambda: column(page, "parameters", "name") == ["encoder", "net", "a-dead-net"],
        )
        assert "abandoned: no worker for" in column(page, "parameters", "open step")[2]
        assert column(page, "parameters", "step")[1] == "40"
        assert "in: w0, w1 missing: w2" in column(page, "parameters", "open step")[1]
        eventually("steps are counted", lambda: column(page, "parameters", "steps/s")[0])
        assert page.text("#ended") == ""
        assert "Ended, all workers have left: 2" in page.text("#ended-part")
        workers = dict(zip(column(page, "workers", "worker"), range(9), strict=False))
        assert {"w0", "w1", "w2"} <= set(workers)
        assert column(page, "workers", "host")[workers["w1"]] == "gpu-2"
        assert column(page, "workers", "process")[workers["w1"]] == str(scene.pid)
        assert column(page, "workers", "version")[workers["w1"]] == shardwell.__version__
        assert column(page, "workers", "transport")[workers["w1"]] == "shared memory"
        assert column(page, "workers", "transport")[workers["w0"]] == "shared memory, unix"
        assert column(page, "workers", "behind")[workers["w2"]] == "1 step"
        assert column(page, "workers", "takes part in")[workers["w0"]] == "encoder, net, users"
        assert "dead" not in workers
        assert column(page, "shards", "state") == ["serving", "serving"]
        for label in ("cores busy", "memory", "files", "disk free"):
            eventually(label, lambda label=label: all(column(page, "shards", label)))
        dark = page.run("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(20, 24, 28)") is is_dark
        keep(browser, page, f"page-{'dark' if is_dark else 'light'}", 900 if is_dark else 1420)
        check_clean(page, scene.url)


def test_settings_of_all_shards_and_where_the_runbook_is(scene, browser, tmp_path) -> None:
    with browser.page(scene.url) as page:
        is_live(page)
        assert page.text("#waits a") == "Training does not go on"
        href = page.run("document.querySelector('#waits a').getAttribute('href')")
        assert href == "runbook.md#:~:text=%23%23%20training%20does%20not%20go%20on"
        read = "fetch('runbook.md').then(answer => answer.text())"
        assert "\n## Training does not go on\n" in page.run(read)
        assert column(page, "settings", "shard") == ["0", "1"]
        assert column(page, "settings", "durability") == ["process", "process"]
        for label in ("stored", "clients", "streams", "shared memory"):
            assert all(" of " in each for each in column(page, "settings", label)), label
        with shardwell.connect(scene.target, worker_id="saver") as client:
            client.save_checkpoint(tmp_path / "saved", ["encoder"])
        eventually(
            "the checkpoint is known",
            lambda: all(
                each.endswith("s ago") for each in column(page, "settings", "last checkpoint")
            ),
        )
        assert page.text("#ending-part") == ""
        page.eventually("charts are drawn", "document.querySelectorAll('.u-legend th').length > 0")
        bare = (
            "[...document.querySelectorAll('.u-legend .u-series')].filter(each =>"
            " !each.querySelector('td').textContent"
            " && getComputedStyle(each.querySelector('th'), '::after').content !== 'none').length"
        )
        assert page.run(bare) == 0
        words = "document.querySelector('#history figure').getAttribute('aria-label')"
        page.eventually("steps are drawn", f"{words}.includes('encoder')")
        assert "an-old-net" not in page.run(words)
        check_clean(page, scene.url)


def test_what_ends_is_shown(browser, tmp_path) -> None:
    tokens = Tokens(tmp_path)
    tokens.add("looker", "read", secret="secret")
    tokens.add("old", "read", expires="2020-01-01T00:00:00Z")
    tokens.add("later", "read", expires="2999-01-01T00:00:00Z")
    with (
        LocalCluster(1, tokens=tokens.path, admin_listen="127.0.0.1:0") as running,
        browser.page("about:blank") as page,
    ):
        page.call("Network.setExtraHTTPHeaders", headers={"Authorization": "Bearer secret"})
        page.open(running.admin_urls[0])
        page.shows("#when", lambda text: text == "live")
        assert column(page, "endings", "name") == ["old", "later"]
        assert column(page, "endings", "ends")[0] == "has ended"
        assert column(page, "endings", "ends")[1].startswith("in ")
        assert "token old has ended, at 2020-01-01T00:00:00Z" in page.text("#waits")
        assert page.text("#waits a") == "A token or certificate has expired"


def test_on_a_phone_nothing_is_cut_off(scene, browser) -> None:
    with browser.page(scene.url, **PHONE) as page:
        is_live(page)
        wide: Any = page.run(
            "[...document.querySelectorAll('td')].filter(each =>"
            " each.getBoundingClientRect().right > innerWidth + 1).length"
        )
        assert wide == 0
        assert page.run("document.documentElement.scrollWidth") == PHONE["width"]
        missing: Any = page.run(
            "(cell => [getComputedStyle(cell, '::before').content, cell.innerText])("
            "[...document.querySelectorAll('#parameters td.names')]"
            ".find(each => each.parentElement.innerText.includes('net\\n')"
            " && each.innerText.includes('w2')))"
        )
        assert "open step" in missing[0] or missing[0] == "attr(data-label)"
        assert "missing: w2" in missing[1]
        keep(browser, page, "page-phone", PHONE["height"])
        check_clean(page, scene.url)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_last_hour_has_axes(scene, browser, is_dark) -> None:
    with browser.page(scene.url, is_dark=is_dark) as page:
        is_live(page)
        titles = "[...document.querySelectorAll('#history figure')].map(each => each.dataset.title)"
        page.eventually("charts are drawn", f"{titles}.length === 5")
        expected = ["steps/s", "cores busy", "payload/s", "memory", "disk free"]
        assert page.run(titles) == expected
        # A chart that has something to draw only later gets its place.
        place = "document.querySelector('#history')"
        page.run(f"{place}.append({place}.firstElementChild)")
        eventually("it is back", lambda: page.run(titles) == expected)
        words = page.run("document.querySelector('#history figure').getAttribute('aria-label')")
        assert "encoder" in words
        assert "users" in words
        assert "a-dead-net" not in words  # which closed no step
        # Something of each line and of both axes is drawn.
        drawn: Any = page.run(
            "[...document.querySelectorAll('#history canvas')].map(canvas => {"
            " const { width, height } = canvas, ink = new OffscreenCanvas(width, height)"
            "  .getContext('2d', { willReadFrequently: true });"
            " ink.drawImage(canvas, 0, 0);"
            " const some = (...where) => ink.getImageData(...where).data.some(each => each);"
            " return [some(0, 0, 50, height), some(60, height - 20, width - 60, 20),"
            "  some(70, 5, width - 80, height - 40)]; })"
        )
        assert drawn == [[True] * 3] * 5
        before = page.run("document.querySelector('#history figure').getAttribute('aria-label')")
        page.eventually(
            "it goes on",
            "document.querySelector('#history figure').getAttribute('aria-label') !== "
            f"{json.dumps(before)}",
        )
        # Other colours are taken at once.
        scheme = {"name": "prefers-color-scheme", "value": "light" if is_dark else "dark"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.eventually(
            "the lines are of the other colours",
            f"JSON.parse([...charts.values()][0].made_for)[0] === {json.dumps(not is_dark)}",
        )
        check_clean(page, scene.url)


def test_the_page_of_one_parameter(scene, browser) -> None:
    with browser.page(scene.url) as page:
        is_live(page)
        page.run("document.querySelectorAll('#parameters a')[1].focus()")
        page.press("Enter")
        page.shows("#one-name", lambda text: text == "Parameter net")
        assert page.run("location.hash") == "#parameter/net"
        assert page.run("document.title") == "net · Shardwell"
        assert page.text("#all") == ""
        page.shows("#one-facts", lambda text: "missing: w2" in text and "324,160" in text)
        eventually("members", lambda: len(column(page, "one-members", "worker")) == 3)
        lines = [column(page, "one-members", name) for name in ("worker", "where", "behind")]
        assert sorted(zip(*lines, strict=True)) == [
            (f"w{rank}", f"process {scene.pid} on gpu-{rank + 1}", "1" if rank == 2 else "0")
            for rank in range(3)
        ]
        eventually("tensors", lambda: column(page, "one-tensors", "name"))
        assert column(page, "one-tensors", "name")[0] == "embed.weight"
        assert column(page, "one-tensors", "shape") == ["5000 x 64", "64 x 64", "64"]
        assert column(page, "one-steps", "step")[:2] == ["39", "38"]
        assert column(page, "one-steps", "last worker")[0] == "w2"
        assert "Adam: " in page.text("#one-settings")
        titles = "[...document.querySelectorAll('#one-charts figure')].map(f => f.dataset.title)"
        page.eventually("curves are drawn", f"{titles}.length === 3")
        assert set(page.run(titles)) == {"loss, by step", "steps/s", "wait of a step"}
        labels = "[...document.querySelectorAll('#one-charts figure')].map(f => f.ariaLabel)"
        words = " ".join(page.run(labels))
        assert re.search(r"loss, by step: loss [\d.]+ last, ", words)
        page.run("history.back()")
        page.shows("#parameters", lambda text: "encoder" in text)
        assert page.text("#one") == ""
        page.open(f"{scene.url}#parameter/encoder")
        page.shows("#one-steps", lambda text: "w1" in text)
        keep(browser, page, "page-parameter", 900)
        page.open(f"{scene.url}#table/users")
        page.shows("#one-name", lambda text: text == "Table users")
        page.shows("#one-facts", lambda text: "10 of 16 values" in text)
        page.shows("#one-tensors", lambda text: text == "a table has rows")
        check_clean(page, scene.url)


def test_a_name_that_no_shard_has_is_text(scene, browser) -> None:
    with browser.page(f"{scene.url}#parameter/{quote(BAD)}", **PHONE) as page:
        page.shows("#one-name", lambda text: text == f"Parameter {BAD}")
        page.shows("#one-none", lambda text: "No shard has a parameter of this name" in text)
        assert page.run("document.images.length") == 0
        assert page.run("document.documentElement.scrollWidth") == PHONE["width"]
        check_clean(page, scene.url)
    with browser.page(f"{scene.url}#parameter/%E0%A4%A") as page:  # which is no text at all
        page.shows("#parameters", lambda text: "encoder" in text)
        check_clean(page, scene.url)


def test_with_the_keyboard(scene, browser) -> None:
    with browser.page(scene.url) as page:
        is_live(page)
        reached = []
        for _ in range(60):
            page.press("Tab")
            reached.append(page.run("document.activeElement.tagName"))
            if reached[-1] == "SUMMARY":
                break
        assert "A" in reached
        page.press("Enter")
        page.shows("#ended", lambda text: "an-old-net" in text and "another-old-net" in text)
        # The refresh each second leaves the focus where it is.
        page.run("document.querySelector('#parameters a').focus()")
        asked = len(page.asked)
        eventually("it asks again", lambda: page.run("1") and len(page.asked) >= asked + 3)
        assert page.run("document.activeElement.innerText") == "encoder"
        check_clean(page, scene.url)


def test_what_others_write_is_text(scene, browser) -> None:
    """Workers name hosts, and clients that open a parameter name tensors."""
    with (
        pytest.MonkeyPatch.context() as patch,
        browser.page(scene.url) as page,
    ):
        patch.setattr(session, "host_name", lambda: BAD)
        with shardwell.connect(scene.target, worker_id="stranger") as client:
            sgd = shardwell.SGD(learning_rate=0.1)
            net = client.parameter("strange", tensors={BAD: (3,)}, optimizer=sgd)
            net.init({BAD: np.zeros(3, np.float32)})
            net.put_gradient({BAD: np.ones(3, np.float32)})
            page.shows("#workers", lambda text: BAD in text)
            page.open(f"{scene.url}#parameter/strange")
            page.shows("#one-tensors", lambda text: BAD in text)
            page.shows("#one-members", lambda text: BAD in text)
            assert page.run("document.images.length") == 0
            client.delete("strange", force=True)
        check_clean(page, scene.url)
