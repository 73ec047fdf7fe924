"""Draws the charts of README and docs from what benchmarks have written.

python tools/charts.py

docs/images/peers.svg           benchmarks/figures/peers.json, of benchmarks/peers.py
docs/images/through-kills.svg   benchmarks/figures/through_kills.json, of through_kills.py
"""

from __future__ import annotations

import itertools
import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES, IMAGES = ROOT / "benchmarks" / "figures", ROOT / "docs" / "images"
INK, PALE, GRID = "#1f2933", "#52606d", "#d5dae0"
OURS, THEIRS, SLOWER = "#2f5fd0", "#c2571a", "#9aa5b1"
FONT = "DejaVu Sans, Verdana, sans-serif"


class Chart:
    """An SVG, element by element, on white, so that it is legible on a dark page, too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' font-family='{FONT}' role='img'>",
            f"<title>{escape(title)}</title>",
            "<rect width='100%' height='100%' rx='8' fill='white'/>",
        ]

    def text(self, x: float, y: float, words: str, **attributes: Any) -> None:
        """A line of text; `anchor`, `size`, `fill`, `bold`."""
        weight = " font-weight='bold'" if attributes.get("bold") else ""
        self._parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{attributes.get('size', 13)}' "
            f"text-anchor='{attributes.get('anchor', 'start')}' "
            f"fill='{attributes.get('fill', INK)}'{weight}>{escape(words)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "") -> None:
        """A thin line."""
        dashes = f" stroke-dasharray='{dash}'" if dash else ""
        self._parts.append(
            f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' "
            f"stroke='{stroke}'{dashes}/>"
        )

    def bar(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled box."""
        self._parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' rx='2' "
            f"fill='{fill}'/>"
        )

    def curve(self, points: list[tuple[float, float]], stroke: str) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f"<polyline points='{path}' fill='none' stroke='{stroke}' stroke-width='2.5'/>"
        )

    def save(self, name: str) -> None:
        """Writes the file."""
        (IMAGES / name).write_text("\n".join([*self._parts, "</svg>"]) + "\n")


def peers() -> None:
    """Our time as a part of a peer's, one bar a row of the table."""
    rows = json.loads((FIGURES / "peers.json").read_text())["rows"]
    left, width, top, pitch = 330, 380, 62, 25
    chart = Chart(860, top + pitch * len(rows) + 42, "Shardwell's time beside that of its peers")
    chart.text(
        20, 28, "Shardwell's time as a part of the peer's: shorter is faster", size=15, bold=True
    )
    scale = width / 2.5
    bottom = top + pitch * len(rows)
    for part in (0, 0.5, 1, 1.5, 2, 2.5):
        x = left + part * scale
        chart.line(x, top - 8, x, bottom, INK if part == 1 else GRID)
        chart.text(x, bottom + 18, f"{part:g}", anchor="middle", fill=PALE)
    chart.text(left + scale, top - 14, "as fast", anchor="middle", fill=PALE)
    for number, row in enumerate(rows):
        y = top + pitch * number
        chart.text(left - 10, y + 14, f"{row['what']} / {row['peer']}", anchor="end", size=12)
        fill = OURS if row["ratio"] <= 1 else SLOWER
        chart.bar(left, y + 2, row["ratio"] * scale, pitch - 8, fill)
        chart.text(left + row["ratio"] * scale + 6, y + 14, f"{row['ratio']:.2f}", size=12)
    chart.save("peers.svg")


def through_kills() -> None:
    """The model's step over time, while a worker is killed."""
    found = json.loads((FIGURES / "through_kills.json").read_text())
    left, right, top, bottom = 64, 660, 64, 330
    chart = Chart(860, 384, "Training steps over time while a worker is killed three times")
    words = "Four workers train; one is killed with kill -9 three times, and started again"
    chart.text(20, 28, words, size=15, bold=True)
    seconds = found["seconds"]
    steps = max(step for name in ("shards", "ddp") for _, step in found[name]["points"])
    highest = -(-steps // 100) * 100

    def place(second: float, step: float) -> tuple[float, float]:
        x = left + (right - left) * second / seconds
        return x, bottom - (bottom - top) * step / highest

    for step in range(0, highest + 1, 100):
        y = place(0, step)[1]
        chart.line(left, y, right, y, GRID)
        chart.text(left - 8, y + 5, str(step), anchor="end", fill=PALE)
    for second in range(0, int(seconds) + 1, 10):
        chart.text(place(second, 0)[0], bottom + 20, str(second), anchor="middle", fill=PALE)
    chart.text((left + right) / 2, bottom + 42, "seconds", anchor="middle", fill=PALE)
    chart.text(20, 52, "steps", fill=PALE)
    for name, stroke, label in (
        ("ddp", THEIRS, ["DDP over gloo:", "the job ends with", "the killed rank"]),
        ("shards", OURS, ["Shardwell:", "the others go on", "a second later"]),
    ):
        points = [point for point in found[name]["points"] if point[0] <= seconds]
        curve = [place(*points[0])]
        for (_, before), (second, step) in itertools.pairwise(points):
            curve += [place(second, before), place(second, step)]
        chart.curve(curve, stroke)
        for when in found[name]["killed_s"]:
            x, y = place(when, max(step for second, step in points if second <= when))
            chart.text(x, y - 7, "✕", anchor="middle", fill=stroke, bold=True)
        x, y = place(*points[-1])
        if name == "ddp":
            chart.line(x, y, right, y, stroke, "3 5")
        for number, line in enumerate(label):
            chart.text(right + 12, y + 5 + 17 * number, line, fill=stroke, bold=not number)
    chart.save("through-kills.svg")


if __name__ == "__main__":
    peers()
    through_kills()
