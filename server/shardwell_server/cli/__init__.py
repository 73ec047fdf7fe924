"""The command `shardwell`. Flags stand over $SHARDWELL_* variables, which stand over defaults."""

from __future__ import annotations

import importlib
import os
from typing import NoReturn

import click

from shardwell_server import terminal
from shardwell_server.processes import signals
from shardwell_server.processes.own import end_process

_MODULES = {
    "certs": "credentials",
    "delete": "names",
    "demo": "digits",
    "demo-worker": "digits",
    "table": "names",
    "token": "credentials",
    "top": "status",
    "train-digits": "digits",
}
"""The modules of commands that are not named as their command."""
_COMMANDS = sorted([
    "bench", "checkpoint", "cluster", "health", "members", "plan", "run", "samples", "serve",
    "status", "trace", *_MODULES,
])  # fmt: skip
_HOLDING_SIGNALS = ("cluster", "demo", "run", "serve")
"""Commands that ask for signals where they can stop; the others are broken off."""


class SuggestingGroup(click.Group):
    """Answers a wrong command with the most similar one."""

    def resolve_command(  # noqa: D102 (click's)
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(context, args)
        except click.UsageError as error:
            from shardwell.specs.names import neighbour  # not before commands say what they need

            meant = neighbour(args[0], self.list_commands(context))
            if not meant:
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}{meant}", context) from None


class _LazyGroup(SuggestingGroup):
    """Imports a command's module when the command is used: `shardwell health` needs little."""

    def list_commands(self, context: click.Context) -> list[str]:
        return _COMMANDS

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        if name != "run":  # whose workers are the user's, and may compute on all cores
            # Else each process starts a thread a core, of which shards use none.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command


def _tell_version(context: click.Context) -> NoReturn:
    import shardwell
    from shardwell.numerics import native

    click.echo(f"shardwell, version {shardwell.__version__}, {native.describe()}")
    context.exit()


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda context, _, is_wanted: _tell_version(context) if is_wanted else None,
    help="Show the version, and what computes, and exit.",
)
@click.pass_context
def commands(context: click.Context) -> None:
    """A sharded parameter server for training on commodity machines."""
    # Here the command's module has been imported.
    if context.invoked_subcommand not in _HOLDING_SIGNALS:
        signals.break_off()


def main() -> NoReturn:
    """Runs the command; errors that a user can act on are one line and exit code 1."""
    signals.hold()
    outputs = terminal.Outputs()
    for name in filter(lambda name: name.startswith("SHARDWELL_"), list(os.environ)):
        os.environ[name] = os.environ[name].strip()  # of files that were written on Windows, say
        environment = importlib.import_module("shardwell.process.environment")  # only where needed
        environment.warn_of_misspelt_variables()
    color = False if terminal.is_plain() else None
    try:
        code = commands.main(standalone_mode=False, color=color) or 0
    except signals.StoppedError as stopped:
        click.echo(f"Stopped by {stopped.cause}.", err=True)
        code = stopped.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except Exception as error:
        from shardwell.errors import ShardwellError

        if not isinstance(error, ShardwellError):
            raise
        click.secho(f"shardwell: {error.message}", fg="red", err=True, color=color)
        code = 1
    end_process(outputs.final_code(code))
