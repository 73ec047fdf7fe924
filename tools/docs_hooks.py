"""Hooks of mkdocs.yml: the README as first page, the API reference, links out of docs/, llms.txt.

A link from a page to a file outside docs/, which a site does not have, becomes the file's path.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
_INDEX = "index.md"
PACKAGES = {"shardwell": "The SDK", "shardwell_server": "The service"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of something else."""
    readme = (ROOT / "README.md").read_text().replace("](docs/images/", "](images/")
    files.append(File.generated(config, _INDEX, content=readme))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Takes away links that lead out of docs/."""
    docs, name = Path(config.docs_dir), page.file.src_uri
    directory = ROOT if name == _INDEX else (docs / name).parent

    def replaced(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, _, heading = target.partition("#")
        found = (directory / path).resolve()
        if "://" in target or not path:
            return match[0]
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
    for name in sorted(path.name for path in Path(config.docs_dir).glob("*.md")):
        text = (Path(config.docs_dir) / name).read_text()
        title = text.partition("\n")[0].lstrip("# ")
        first = re.search(r"\n\n(?![#|`\-! ])(.*?)(?:\.\s|:\n|\n\n)", text, re.S)
        told = " ".join(first[1].split()) if first else title
        lines.append(f"- [{title}]({name.removesuffix('.md')}/): {_plain(told)}")
    lines.append("- [API reference](reference/): every public name, with shapes, units and errors")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def _plain(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)


def _reference() -> str:
    """Every public name, by package."""
    parts = ["# API reference\n"]
    for package, title in PACKAGES.items():
        parts.append(f"## {title}: `{package}`\n")
        parts += [f"::: {package}.{name}\n" for name in importlib.import_module(package).__all__]
    return "\n".join(parts)
