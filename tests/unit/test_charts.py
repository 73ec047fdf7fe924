"""Goal: what the charts draw is what the page of benchmarks says, and what the benchmark measured.

Method: the figures of benchmarks/figures are looked up in docs/performance.md and in the SVGs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/performance.md").read_text()
FIGURES = ROOT / "benchmarks/figures"


def test_the_chart_of_peers_has_the_ratios_of_the_page() -> None:
    drawn = (ROOT / "docs/images/peers.svg").read_text()
    for row in json.loads((FIGURES / "peers.json").read_text())["rows"]:
        cells = [row["what"], f"{row['ms']:g} ", row["peer"], f"{row['peer_ms']:g} "]
        cells.append(f"{row['ratio']:.2f} (")
        lines = [line for line in PAGE.splitlines() if all(f"| {cell}" in line for cell in cells)]
        assert len(lines) == 1, row
        words = f"{row['what']} / {row['peer']}".replace("'", "&#x27;")
        assert re.search(rf">{re.escape(words)}<(?:.|\n)*?>{row['ratio']:.2f}<", drawn), words


def test_the_text_about_kills_has_what_was_measured() -> None:
    found = json.loads((FIGURES / "through_kills.json").read_text())
    text = PAGE.partition("## Through kills\n")[2].partition("\n## ")[0]
    pauses = [f"{pause:.1f}" for pause in found["shards"]["pauses_s"]]
    assert f"after {pauses[0]}, {pauses[1]} and {pauses[2]} s" in text
    assert f"makes {found['shards']['steps']} steps in\n{found['seconds']:.0f} s" in text
    assert f"makes {found['ddp']['steps']} steps" in text
