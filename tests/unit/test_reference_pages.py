"""Goal: the reference has every public name on one page, and every command with its options.

Method: names come from each module's `__all__`, read from its source, so that no framework is
imported; pages from docs/reference/. Commands and variables come from the options of the
command itself.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shardwell_server.cli import commands

ROOT = Path(__file__).parents[2]
MODULES = {
    "shardwell": "client/shardwell/__init__.py",
    "shardwell.torch": "client/shardwell/torch/__init__.py",
    "shardwell.jax": "client/shardwell/jax/__init__.py",
    "shardwell.ray": "client/shardwell/ray.py",
    "shardwell_server": "server/shardwell_server/__init__.py",
}
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))


def exported(path: str) -> list[str]:
    """What a module's `__all__` lists."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{path} has no __all__")


def test_every_public_name_is_on_one_page() -> None:
    public = [f"{module}.{name}" for module, path in MODULES.items() for name in exported(path)]
    directives = re.findall(r"^::: (\S+)$", "\n".join(map(Path.read_text, PAGES)), re.M)
    assert Counter(directives) == Counter(public)


def test_the_site_has_every_page_of_the_reference() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    assert [path.name for path in PAGES if f"reference/{path.name}" not in nav] == []


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> str:
    """The page of the command."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import command_reference

    monkeypatch.delitem(sys.modules, "command_reference")
    return command_reference.command_reference()


def _variables(group: click.Group) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _variables(command)
        for parameter in command.params if not command.hidden else []:
            names = parameter.envvar or ()
            yield from (names,) if isinstance(names, str) else names


def test_every_command_and_variable_is_on_the_page(page: str) -> None:
    variables = set(_variables(commands))
    assert {"SHARDWELL_DATA_DIR", "SHARDWELL_TLS_CA", "SHARDWELL_LISTEN"} <= variables
    assert variables <= set(re.findall(r"`(SHARDWELL_\w+)`", page))
    for command in ("serve", "status", "checkpoint save", "token create"):
        assert re.search(rf"^#+ shardwell {command}$", page, re.M), command


def test_an_option_has_its_default_variable_and_help(page: str) -> None:
    serve = page.partition("## shardwell serve\n")[2].partition("\n## ")[0]
    found = re.search(r"^`--session-lease-s SECONDS`\n:   (.*)$", serve, re.M)
    assert found
    assert "Default: `30" in found[1]
    assert found[1].endswith("Variable: `SHARDWELL_SESSION_LEASE_S`.")
    assert "--exit-with-parent" not in page  # hidden
    assert "shardwell demo-worker" not in page


def test_help_is_not_read_as_markdown(page: str) -> None:
    restart = page.partition("## shardwell run\n")[2].partition("\n## ")[0]
    assert "$SHARDWELL\\_RESTART" in restart
