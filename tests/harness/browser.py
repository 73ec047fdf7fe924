"""A real browser, for tests of the status page: Chromium without a screen, over its own protocol.

Chromium reads commands from descriptor 3 and writes answers and events to descriptor 4 (Chrome
DevTools Protocol, `--remote-debugging-pipe`), so that no port and no package is needed. One thread
uses it; each wait has a deadline.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import struct
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness.polling import PATIENCE_S, eventually

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--remote-debugging-pipe",
)
_DESCRIPTOR_MIN = 10
"""Of the pipes: the shell is to find none of them at 3 or 4."""
KEYS = {"Tab": 9, "Enter": 13, " ": 32}
"""Those that tests press, and their codes."""


class Browser:
    """Chromium, from its construction until `close`.

    Args:
        program: Path of Chromium.
        profile: An empty directory for what it stores.
    """

    def __init__(self, program: str, profile: Path) -> None:
        to_it, self._to = _high_pipe()
        self._from, from_it = _high_pipe()
        # The shell puts the pipes where Chromium looks for them, and becomes it.
        command = f'exec "$0" "$@" 3<&{to_it} 4>&{from_it}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, program, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        self._count = 0
        self._read = b""
        self._pages: dict[str, Page] = {}

    def close(self) -> None:
        """Ends it, and all processes that it began. Safe to repeat."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError, AssertionError):
                self.call("Browser.close")
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def call(self, method: str, session: str = "", **fields: Any) -> Any:
        """The result of a command.

        Raises:
            AssertionError: Chromium refused it, or did not answer in time.
        """
        self._count += 1
        number = self._count
        asked: dict[str, Any] = {"id": number, "method": method, "params": fields}
        if session:
            asked["sessionId"] = session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            message = self._next(deadline_s, method)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            page = self._pages.get(message.get("sessionId", ""))
            if page is not None:
                page.hear(message)

    def _next(self, deadline_s: float, method: str) -> Any:
        while b"\0" not in self._read:
            left_s = deadline_s - time.monotonic()
            ready = select.select([self._from], [], [], max(left_s, 0.0))[0]
            assert ready, f"Chromium has not answered {method} within {PATIENCE_S:g} s"
            found = os.read(self._from, 1 << 20)
            assert found, f"Chromium has ended before it answered {method}"
            self._read += found
        line, _, self._read = self._read.partition(b"\0")
        return json.loads(line)

    @contextlib.contextmanager
    def page(
        self, url: str, *, width: int = 1280, height: int = 900, is_dark: bool = False
    ) -> Iterator[Page]:
        """A page in a profile of its own, while the block runs.

        Args:
            url: What it opens.
            width: Width of the window; a phone's below 600.
            height: Height of the window.
            is_dark: Whether the system prefers dark colours.
        """
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", flatten=True, targetId=target["targetId"])
        page = Page(self, attached["sessionId"])
        self._pages[attached["sessionId"]] = page
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            page.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=width < 600,
            )
            scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
            page.call("Emulation.setEmulatedMedia", features=[scheme])
            page.open(url)
            yield page
        finally:
            del self._pages[attached["sessionId"]]
            self.call("Target.disposeBrowserContext", browserContextId=context)


def _high_pipe() -> list[int]:
    """Both ends of a pipe."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR_MIN) for end in ends]
    for end in ends:
        os.close(end)
    return high


def with_palette(page: Page, picture: bytes) -> bytes:
    """A picture as a PNG of 256 colours, a third of the size: its commonest, and what is nearest.

    Args:
        page: One that no policy keeps from reading the picture, such as about:blank.
        picture: A PNG.
    """
    source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    width, height, raw = page.run(_PIXELS % json.dumps(source))
    pixels = np.frombuffer(base64.b64decode(raw), np.uint8).reshape(-1, 4)[:, :3]
    colours, which, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    palette = colours[np.argsort(-counts, kind="stable")[:256]]
    apart = ((colours[:, None].astype(int) - palette[None].astype(int)) ** 2).sum(axis=2)
    indices = apart.argmin(axis=1).astype(np.uint8)[which.reshape(-1)].reshape(height, width)
    rows = np.zeros((height, width + 1), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = indices
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = [(b"IHDR", head), (b"PLTE", palette.tobytes())]
    parts += [(b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
    made = b"".join(
        struct.pack(">I", len(contents)) + kind + contents
        + struct.pack(">I", zlib.crc32(kind + contents))
        for kind, contents in parts
    )  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + made


_PIXELS = """(async source => {
    const bitmap = await createImageBitmap(await (await fetch(source)).blob());
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
    canvas.drawImage(bitmap, 0, 0);
    const bytes = canvas.getImageData(0, 0, bitmap.width, bitmap.height).data;
    let text = "";
    for (let at = 0; at < bytes.length; at += 32768)
        text += String.fromCharCode(...bytes.subarray(at, at + 32768));
    return [bitmap.width, bitmap.height, btoa(text)];
})(%s)"""


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        """What the console has of errors and warnings, exceptions among them."""
        self.asked: list[str] = []
        """Addresses that the page has asked for."""

    def call(self, method: str, **fields: Any) -> Any:
        """The result of a command for this page."""
        return self._browser.call(method, self._session, **fields)

    def hear(self, message: Any) -> None:
        """Notes an event."""
        told = message["params"]
        match message["method"]:
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                words = details.get("exception", {}).get("description", details["text"])
                self.errors.append(words)
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(each.get("value")) for each in told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.asked.append(told["request"]["url"])

    def open(self, url: str) -> None:
        """Opens an address; returns when all that the page names has come."""
        self.call("Page.navigate", url=url)
        is_there = f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        self.eventually("the page is there", is_there)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it comes to."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def eventually(self, what: str, script: str) -> Any:
        """The first value of an expression that is true."""
        return eventually(what, lambda: self.run(script))

    def text(self, selector: str) -> str:
        """What people read in an element; empty where it is not, or is hidden."""
        found = f"document.querySelector({json.dumps(selector)})"
        return str(self.run(f"{found}?.checkVisibility() ? {found}.innerText : ''"))

    def shows(self, selector: str, is_it: Callable[[str], Any]) -> str:
        """The text of an element, once it is what it should be."""

        def look() -> str:
            found = self.text(selector)
            return found if is_it(found) else ""

        try:
            return eventually(f"{selector} is right", look)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is: {self.text(selector)!r}") from None

    def press(self, key: str) -> None:
        """Presses a key and lets it go."""
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        written = {"Enter": "\r", " ": " "}.get(key)
        if written:
            fields["text"] = written
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def picture(self, *, height: int | None = None) -> bytes:
        """The page from its top, as a PNG.

        Args:
            height: How much of it; None: all.
        """
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shown = min(size["height"], height) if height else size["height"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": shown, "scale": 1}
        found = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        return base64.b64decode(found["data"])
