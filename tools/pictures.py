"""Draws the pictures of README and docs.

python tools/pictures.py [NAME...]    all, or those that are named: architecture, step, ...

docs/images/architecture.svg    workers, shards, and what travels
docs/images/exchange.svg        one chunk of an `exchange`, from the SDK to the disk and back
docs/images/members.svg         a step with a worker that is late and one that is lost
docs/images/outer.svg           an outer step of two learners, in two fragments
docs/images/step.svg            a step of two workers and two shards
docs/images/late-worker.svg     a step that waits for all workers, and one that closes without one
docs/images/shard-files.svg     the files of a parameter, and the writes of one transition
docs/images/threads.svg         the threads that a call meets
docs/images/demo.svg            the screen of a real `shardwell demo`, which this runs
"""

from __future__ import annotations

import io
import subprocess
import sys
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
INK, PALE, WORKER, SHARD, DISK = "#1f2933", "#52606d", "#d9e8fb", "#fde8c8", "#e3e7eb"
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"


class Picture:
    """An SVG, element by element, on white."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, fill: str) -> None:
        """A rounded box."""
        self._parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='{fill}' "
            f"stroke='{INK}'/>"
        )

    def text(
        self,
        x: int,
        y: int,
        words: str,
        *,
        size: int = 14,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        """A line of text."""
        weight = " font-weight='bold'" if bold else ""
        color = INK if size >= 14 else PALE
        self._parts.append(
            f"<text x='{x}' y='{y}' {FONT} font-size='{size}' text-anchor='middle' "
            f"fill='{color}'{weight}>{escape(words)}</text>"
        )

    def arrow(self, x1: int, y1: int, x2: int, y2: int, *, both: bool = False) -> None:
        """A line with a head at its end, or at both."""
        start = " marker-start='url(#head)'" if both else ""
        self._parts.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{INK}' stroke-width='1.5' "
            f"marker-end='url(#head)'{start}/>"
        )

    def line(self, x1: int, y1: int, x2: int, y2: int) -> None:
        """A thin dashed line."""
        self._parts.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{PALE}' "
            "stroke-dasharray='4 4'/>"
        )

    def save(self, name: str) -> None:
        """Writes the file."""
        width, height = self._size
        (IMAGES / name).write_text(
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}'>\n"
            "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' "
            f"markerHeight='7' orient='auto-start-reverse'><path d='M0 0 10 5 0 10z' fill='{INK}'/>"
            "</marker></defs>\n<rect width='100%' height='100%' fill='white'/>\n"
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def architecture() -> None:
    """Two workers, two shards."""
    picture = Picture(760, 330)
    for number, x in enumerate((60, 420)):
        picture.box(x, 20, 280, 60, WORKER)
        picture.text(x + 140, 45, f"worker w{number}", bold=True)
        picture.text(x + 140, 66, "your training loop, the SDK", size=13)
        picture.box(x, 190, 280, 90, SHARD)
        picture.text(x + 140, 213, f"shard {number}", bold=True)
        picture.text(x + 140, 234, "float32 weights, sums, optimizer state", size=13)
        picture.text(x + 140, 252, "of one slice, chunk by chunk; who has", size=13)
        picture.text(x + 140, 270, "contributed what; in files, if you like", size=13)
        for other in (60, 420):
            offset = 40 if other == x else (60 if other > x else -60)
            picture.arrow(x + 140 + offset // 2, 80, other + 140 - offset // 2, 190, both=True)
    picture.text(380, 312, "gradients in, weights out: fp16 with a scale a block, CRC32C", size=13)
    picture.save("architecture.svg")


def exchange() -> None:
    """The walk of one chunk."""
    columns = {
        "Parameter": (90, WORKER), "ShardStream": (310, WORKER), "service": (530, SHARD),
        "ParameterSlice": (750, SHARD), "MmapParameter": (990, DISK),
    }  # fmt: skip
    steps = [
        ("Parameter", "ShardStream", "encode fp16, seal, CRC32C"),
        ("ShardStream", "service", "Exchange: one chunk"),
        ("service", "ParameterSlice", "contribute: CRC, length, finite"),
        ("ParameterSlice", "ParameterSlice", "member? step? duplicate?"),
        ("ParameterSlice", "MmapParameter", "journal, undo: the block as it was"),
        ("ParameterSlice", "MmapParameter", "add, or mean and update"),
        ("ParameterSlice", "MmapParameter", "record: the instant of change; mark"),
        ("service", "ParameterSlice", "weights of the next version"),
        ("service", "ShardStream", "the chunk, sealed"),
        ("ShardStream", "Parameter", "check, decode into the array"),
    ]
    height = 90 + 46 * len(steps)
    picture = Picture(1080, height)
    for name, (x, fill) in columns.items():
        picture.line(x, 50, x, height - 10)
        picture.box(x - 72, 14, 144, 34, fill)
        picture.text(x, 36, name, bold=True)
    for number, (source, target, words) in enumerate(steps):
        x1, x2, y = columns[source][0], columns[target][0], 90 + 46 * number
        if source == target:
            picture.text(x1, y - 6, words, size=12)
        else:
            picture.arrow(x1, y, x2, y)
            picture.text((x1 + x2) // 2, y - 6, words, size=12)
    picture.save("exchange.svg")


def members() -> None:
    """One chunk of step 7: who is in time, who is late, and who is lost."""
    picture = Picture(960, 330)
    lanes = {"w0": 60, "w1": 140, "w2": 220}
    left, lost, closed, late = 110, 300, 560, 690
    picture.box(10, 262, 80, 44, SHARD)
    picture.text(50, 289, "shard", bold=True)
    picture.line(left, 284, 940, 284)
    for name, y in lanes.items():
        picture.box(10, y - 22, 80, 44, WORKER)
        picture.text(50, y + 5, name, bold=True)
        picture.line(left, y, lost if name == "w2" else 940, y)
    picture.text(180, 40, "computes step 7", size=13)
    picture.arrow(240, 60, 260, 280)
    picture.text(262, 100, "gradient", size=13)
    picture.text(lost, 212, "killed", size=13)
    picture.text(lost + 90, 240, "a second later no step awaits it", size=13)
    picture.text(closed - 130, 306, "grace begins with the gradient of w0", size=13)
    picture.text(closed, 256, "grace is over: closed", size=14, bold=True)
    picture.text(closed, 274, "set: w0", size=13)
    picture.arrow(closed + 6, 280, closed + 30, 62)
    picture.text(closed + 60, 46, "weights 8: all counted", size=13)
    picture.arrow(late - 20, 140, late, 280)
    picture.text(late - 100, 132, "gradient of step 7, late", size=13)
    picture.arrow(late + 6, 280, late + 30, 142)
    picture.text(late + 130, 132, "weights 8: none counted", size=13)
    picture.text(840, 306, "step 8 awaits w0 and w1", size=13)
    picture.save("members.svg")


def outer() -> None:
    """Twelve inner steps of two learners, in which each of two fragments is sent once."""
    picture = Picture(980, 400)
    lanes = {"w0": 70, "w1": 330}
    left, width, shards = 120, 68, 200
    picture.box(10, shards - 30, 92, 60, SHARD)
    picture.text(56, shards + 5, "shards", bold=True)
    picture.line(left, shards, 960, shards)
    for name, y in lanes.items():
        picture.box(10, y - 22, 92, 44, WORKER)
        picture.text(56, y + 5, name, bold=True)
        for step in range(12):
            picture.box(left + width * step, y - 16, width - 6, 32, WORKER)
            picture.text(left + width * step + 31, y + 5, str(step + 1))
    for number, offered in enumerate((4, 10)):
        begin, end = left + width * offered - 3, left + width * (offered + 2) - 3
        counted, new = begin + 20, end - 20
        for y, side in ((70, 1), (330, -1)):
            picture.arrow(begin, y + 16 * side, counted, shards - 26 * side)
            picture.arrow(new, shards - 26 * side, end, y + 16 * side)
        picture.box(counted - 8, shards - 26, new - counted + 16, 52, SHARD)
        picture.text((counted + new) // 2, shards - 5, f"fragment {number}")
        picture.text((counted + new) // 2, shards + 14, "mean, outer SGD", size=12)
        picture.text(begin - 66, 128, "offers", size=13)
        picture.text(begin - 66, 145, "image - local", size=13)
        picture.text(end + 22, 128, "takes", size=13)
    picture.text(430, 40, "inner steps of its own, also while a fragment travels", size=13)
    words = "sync_every=12, fragments=2, overlap=2: a fragment is due every 6 steps"
    picture.text(490, 385, words, size=13)
    picture.save("outer.svg")


def step() -> None:
    """Step 7 of two workers and two shards, from gradients to weights."""
    picture = Picture(980, 420)
    lanes = {"worker w0": (50, WORKER), "worker w1": (130, WORKER)}
    shards = {"shard 0": (250, SHARD), "shard 1": (340, SHARD)}
    for name, (y, fill) in (lanes | shards).items():
        picture.line(120, y, 960, y)
        picture.box(10, y - 22, 110, 44, fill)
        picture.text(65, y + 5, name, bold=True)
    for y, begin, width in ((50, 140, 130), (130, 140, 260)):
        picture.box(begin, y - 16, width, 32, WORKER)
        picture.text(begin + 65, y + 5, "computes")
    for y, sent in ((50, 290), (130, 420)):
        picture.arrow(sent, y + 4, sent + 30, 232)
        picture.arrow(sent + 14, y + 4, sent + 62, 322)
    picture.text(270, 190, "slice 0", size=13)
    picture.text(298, 292, "slice 1", size=13)
    for y in (250, 340):
        picture.box(326, y - 16, 96, 32, "white")
        picture.text(374, y + 5, "sum: w0")
        picture.box(486, y - 16, 184, 32, SHARD)
        picture.text(578, y + 5, "mean, optimizer")
        picture.text(860, y - 8, "weights, version 8", size=13)
    for source in (250, 340):
        for target in (50, 130):
            picture.arrow(672, source - 14, 796, target + 12)
    for y in (50, 130):
        picture.box(800, y - 16, 130, 32, WORKER)
        picture.text(865, y + 5, "step 8")
    picture.text(490, 392, "Each shard has its own slice and asks no other shard.", size=13)
    picture.text(
        490, 410, "A slice travels as chunks; every chunk makes this way by itself.", size=13
    )
    picture.save("step.svg")


def late_worker() -> None:
    """The same late worker with a fixed number of workers, and with a quorum and grace."""
    picture = Picture(960, 460)
    left, late = 130, 760
    for top, title in ((0, "worker_count=3"), (230, "members=, min_contributors=2, grace_s=")):
        picture.text(480, top + 24, title, bold=True)
        for number, y in enumerate((top + 60, top + 110, top + 160)):
            picture.line(left, y, 940, y)
            picture.box(10, y - 18, 110, 36, WORKER)
            picture.text(65, y + 5, f"worker w{number}", bold=True)
            width = 630 if number == 2 else 150 + 40 * number
            picture.box(left, y - 13, width, 26, WORKER)
            picture.text(left + width // 2, y + 5, "computes step 7")
        picture.line(10, top + 204, 940, top + 204)
    for y, begin in ((60, 280), (110, 320)):
        picture.box(begin, y - 13, late - begin, 26, DISK)
        picture.text((begin + late) // 2, y + 5, "waits")
    picture.text(850, 79, "step 7 closes:", size=13)
    picture.text(850, 97, "mean of w0, w1, w2", size=13)
    closed = 440
    for y, begin in ((290, 280), (340, 320)):
        picture.box(begin, y - 13, closed - begin, 26, DISK)
        picture.text((begin + closed) // 2, y + 5, "waits" if y == 290 else "grace_s")
        picture.box(closed, y - 13, 200, 26, WORKER)
        picture.text(closed + 100, y + 5, "computes step 8")
    picture.text(closed + 20, 322, "step 7 closes: mean of w0, w1", size=13)
    picture.text(850, 362, "late: w2 gets weights 8,", size=13)
    picture.text(850, 380, "outcome.counted is 'none'", size=13)
    picture.save("late-worker.svg")


def shard_files() -> None:
    """A parameter's files, and in which order one transition of a chunk writes them."""
    picture = Picture(980, 470)
    picture.box(10, 10, 390, 400, "white")
    picture.text(205, 36, "DATA_DIR/parameters/000001/", bold=True)
    files = [
        ("parameter.json", "size, optimizer, workers, layout", DISK),
        ("weights", "float32, mapped", SHARD),
        ("gradient_sum", "float32, sums of the open steps", SHARD),
        ("slot-0, slot-1", "optimizer state, float32", SHARD),
        ("records", "a version and CRCs for each chunk", DISK),
        ("marks", "last step of each worker, by chunk", DISK),
        ("undo", "old values of chunks in change", DISK),
        ("events", "seats, first weights, rates", DISK),
        ("kept", "old weights, for a checkpoint", DISK),
    ]
    for number, (name, words, fill) in enumerate(files):
        y = 54 + 39 * number
        picture.box(24, y, 130, 30, fill)
        picture.text(89, y + 20, name)
        picture.text(275, y + 20, words, size=13)
    picture.text(690, 36, "the last gradient of step 7 comes: chunk 3 closes", bold=True)
    writes = [
        ("undo", "the old values of a block", "before"),
        ("weights, slots", "the block: mean, optimizer", "before"),
        ("records", "version 8 and CRCs, beside version 7", "before"),
        ("records", "one store of 8 bytes: version 8 is valid", "after"),
        ("marks", "this worker has made step 7", "after"),
    ]
    for number, (name, words, state) in enumerate(writes):
        y = 66 + 66 * number
        picture.box(430, y, 130, 36, SHARD if "weights" in name else DISK)
        picture.text(495, y + 23, name)
        picture.text(705, y + 23, words, size=13)
        picture.text(920, y + 23, state, bold=state == "after")
        if number < len(writes) - 1:
            picture.arrow(495, y + 36, 495, y + 66)
    picture.text(920, 56, "killed here:", size=13)
    picture.text(
        690, 412, "before: the next start copies the undo back, and the worker sends again", size=13
    )
    picture.text(690, 432, "after: the next start writes the mark again from the record", size=13)
    picture.text(
        490,
        460,
        "--durability step adds journal-N and image-N/, synced to disk, for loss of power",
        size=13,
    )
    picture.save("shard-files.svg")


def threads() -> None:
    """A call from the user's thread to the shard and back."""
    picture = Picture(1000, 470)
    picture.box(10, 10, 470, 410, "white")
    picture.text(245, 34, "worker process: the SDK", bold=True)
    picture.box(520, 10, 470, 410, "white")
    picture.text(755, 34, "shard process", bold=True)
    boxes = [
        (30, 50, "your thread", "waits on a queue; Ctrl-C ends the wait", WORKER),
        (30, 140, "call thread", "gives messages to be sent, reads all answers", WORKER),
        (30, 226, "sending threads", "gRPC's, or a writer: make and send long messages", WORKER),
        (30, 290, "core threads", "encode and decode chunks: one fewer than threads=", WORKER),
        (30, 354, "cancelling thread", "ends calls at their deadline", WORKER),
        (540, 50, "watcher", "closes steps by time: grace, lost members", SHARD),
        (540, 140, "loop", "reads messages, writes answers; calls wait here", SHARD),
        (540, 230, "work threads, up to 32", "check, sum, update, encode, write files", SHARD),
    ]
    for x, y, name, words, fill in boxes:
        picture.box(x, y, 430, 52, fill)
        picture.text(x + 215, y + 22, name, bold=True)
        picture.text(x + 215, y + 41, words, size=13)
    picture.arrow(245, 102, 245, 140, both=True)
    picture.text(335, 126, "a call, its outcome", size=13)
    picture.arrow(245, 192, 245, 226, both=True)
    picture.text(310, 214, "messages", size=13)
    picture.arrow(460, 244, 540, 176)
    picture.arrow(540, 160, 460, 160)
    picture.arrow(755, 102, 755, 140)
    picture.text(860, 126, "a step has closed: go on", size=13)
    picture.arrow(755, 192, 755, 230, both=True)
    picture.text(850, 216, "a message, its result", size=13)
    picture.text(
        500, 446, "between them: gRPC, or a Unix socket and shared memory on one machine", size=13
    )
    picture.save("threads.svg")


def demo() -> None:
    """Runs it."""
    command = [sys.executable, "-m", "shardwell_server", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    console = Console(record=True, width=84, file=io.StringIO())
    console.print(Text("$ make demo", style="bold"))
    console.print(Text(done.stdout.rstrip()))
    console.save_svg(str(IMAGES / "demo.svg"), title="shardwell")


PICTURES = {
    "architecture": architecture,
    "exchange": exchange,
    "members": members,
    "outer": outer,
    "step": step,
    "late-worker": late_worker,
    "shard-files": shard_files,
    "threads": threads,
    "demo": demo,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
