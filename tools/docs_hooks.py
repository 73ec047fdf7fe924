"""Hooks of mkdocs.yml: pages made of something else, ranks of the search, links, llms.txt.

README.md is the first page, CHANGELOG.md another one, each notebook of docs/tutorial a page;
the reference of the command comes from its click commands. A link from a page to a file outside
docs/, which a site does not have, becomes the file's path.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from command_reference import command_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from notebooks import markdown_of

ROOT = Path(__file__).resolve().parent.parent
_NOTEBOOKS = sorted((ROOT / "docs/tutorial").glob("*.ipynb"))
_GENERATED = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    **{f"tutorial/{path.stem}.md": str(path.relative_to(ROOT)) for path in _NOTEBOOKS},
}
"""Pages of docs/, and the file of the repository that each is made of."""
_COMMANDS = "commands.md"
_BOOSTS = {
    "adr/": 0.0005,
    "changelog.md": 0.0001,
    "reference/": 0.7,
    _COMMANDS: 0.7,
    "wire.md": 0.5,
    "architecture.md": 0.5,
}
"""Factors of the search's scores, by the beginning of a page's path; guides have `_GUIDE_BOOST`. It
counts a word of a title a thousand times, so pages that come last have less than a thousandth."""
_GUIDE_BOOST = 2.0
_pages: dict[str, str] = {}
"""First sentences for llms.txt, by path."""
_order: list[Page] = []
"""All pages, as the navigation has them."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the version beside the name."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    config.site_name = f"{config.site_name} {version}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of something else."""
    for name, source in _GENERATED.items():
        path = ROOT / source
        text = markdown_of(path) if path in _NOTEBOOKS else path.read_text()
        text = text.replace("](docs/images/", "](images/")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, _COMMANDS, content=command_reference()))
    return files


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    """Remembers the order of the pages."""
    _order[:] = nav.pages
    return nav


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Ranks the page, and takes away links that lead out of docs/."""
    docs, name = Path(config.docs_dir), page.file.src_uri
    found = [boost for path, boost in _BOOSTS.items() if name.startswith(path)]
    page.meta.setdefault("search", {}).setdefault("boost", found[0] if found else _GUIDE_BOOST)
    _pages[name] = _first_sentence(markdown)
    directory = (ROOT / _GENERATED.get(name, f"docs/{name}")).parent
    generated = {ROOT / source: docs / page for page, source in _GENERATED.items()}

    def replaced(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, _, heading = target.partition("#")
        found = (directory / path).resolve()
        if "://" in target or not path:
            return match[0]
        found = generated.get(found, found)
        if found.is_relative_to(docs):
            inside = found / "README.md" if found.is_dir() else found
            anchor = f"#{heading}" if heading else ""
            return f"[{words}]({os.path.relpath(inside, (docs / name).parent)}{anchor})"
        named = str(found.relative_to(ROOT))
        return words if words.strip("`") == named else f"{words} (`{named}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", replaced, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt: what each page is about, for programs that read."""
    lines = ["# Shardwell", "", f"> {config.site_description}", ""]
    lines += [
        f"- [{page.title}]({page.url or './'}): {_pages[page.file.src_uri]}" for page in _order
    ]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def _first_sentence(markdown: str) -> str:
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.M | re.S)
    found = re.search(r"\n\n(?![#|\-!<:\n ])(.*?)(?:\.\s|:\n|\n\n|$)", prose, re.S)
    text = " ".join(found[1].split()) if found else markdown.partition("\n")[0].lstrip("# ")
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).removesuffix(".")
