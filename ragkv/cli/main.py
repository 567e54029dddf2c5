"""The entry point: all commands, without their heavy imports."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ragkv.cli.ask import ask
from ragkv.cli.check import check
from ragkv.cli.console import err, out, replace_unencodable
from ragkv.cli.plan import plan_command
from ragkv.cli.plugins import plugin_command, plugin_names
from ragkv.cli.precompute import precompute
from ragkv.cli.serve import serve
from ragkv.cli.store import store_app
from ragkv.errors import RagKVError


class _Commands(TyperGroup):
    """Has other packages' commands too; prints errors as one line, without a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *plugin_names()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or plugin_command(cmd_name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        replace_unencodable()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except (RagKVError, OSError) as error:
            err.print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="KV-cache reuse for RAG: compute every chunk's cache once, answer faster.",
)


def _show_version(shown: bool) -> None:
    if shown:
        out.print(f"ragkv {version('ragkv')}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version."),
    ] = False,
) -> None: ...


app.command()(precompute)
app.command()(ask)
app.command()(serve)
app.command("plan")(plan_command)
app.command()(check)
app.add_typer(store_app, name="store")
