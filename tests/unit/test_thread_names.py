"""Goal: docs/concepts/threads.md has the name of each thread that the code starts, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GIVEN = re.compile(
    r'(?:Thread\([^"]*name=|(?:begin|done_at_once|together)\(\s*|after\([^"]*?, '
    r'|(?:ThreadPoolExecutor|DaemonThreads)\([^"]*|\n +\()"(shardwell-[a-z-]+)"'
    r'|CallThreads\("([a-z]+)"\)'
)
NAMELESS = re.compile(r'threading\.Timer\(|threading\.Thread\((?![^"]*name=)')


def test_the_page_has_the_name_of_each_thread() -> None:
    page = (ROOT / "docs/concepts/threads.md").read_text()
    started, nameless = {"shardwell-idle", "shardwell-timer"}, []
    for package in ("client/shardwell", "server/shardwell_server"):
        for path in (ROOT / package).rglob("*.py"):
            text = re.sub(r"\n +>>> .*|\n +\.\.\. .*", "", path.read_text())
            started.update(one or f"shardwell-{two}" for one, two in GIVEN.findall(text))
            nameless += [path.name for _ in NAMELESS.finditer(text)]
    assert started == set(re.findall(r"`(shardwell-[a-z-]+)`", page))
    assert nameless == []
