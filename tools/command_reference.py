"""Makes docs' page of the command `shardwell` from its click commands.

python tools/command_reference.py    prints the page
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator

import click

from shardwell_server.cli import commands


def command_reference() -> str:
    """Every command with its options, their defaults and variables, as the command has them."""
    context = click.Context(commands, info_name="shardwell", max_content_width=100)
    return "\n".join(
        [
            "# The command `shardwell`",
            "",
            "A flag overrides its `SHARDWELL_*` variable, which overrides the default. "
            "`shardwell COMMAND --help` prints the same.",
            "",
            *_described(commands, context),
        ]
    )


def _described(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    if context.parent:
        yield f"{'#' * len(context.command_path.split())} {context.command_path}\n"
    yield f"```text\n{usage}\n```\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        words = paragraph.removeprefix("\b\n")  # click's mark of lines that keep their ends
        is_code = words != paragraph or re.fullmatch(r"shardwell [^.`]*", words)
        yield f"```text\n{words}\n```\n" if is_code else f"{_escaped(words)}\n"
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            yield _option(option, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _described(below, click.Context(below, info_name=name, parent=context))


def _option(option: click.Option, context: click.Context) -> str:
    metavar = option.make_metavar(context).removesuffix(" RANGE")
    names = " / ".join([", ".join(option.opts), *option.secondary_opts])
    variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or [])
    extra = option.get_help_extra(context)
    facts = [
        *([f"Default: `{extra['default']}`."] if extra.get("default") else []),
        *([f"Range: `{extra['range']}`."] if extra.get("range") else []),
        *(["Required."] if option.required else []),
        *(["May be given several times."] if option.multiple else []),
        *([f"Variable: {' or '.join(f'`{name}`' for name in variables)}."] if variables else []),
    ]
    text = _escaped(" ".join((option.help or "").split()))
    flag = names if option.is_flag else f"{names} {metavar}"
    return f"`{flag}`\n:   {' '.join([text, *facts])}\n"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, with code in backquotes."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*_{}\[\]])", r"\\\1", html.escape(parts[i], quote=False))
    return "`".join(parts)


if __name__ == "__main__":
    print(command_reference())
