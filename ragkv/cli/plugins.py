"""Commands of other packages, found by the entry points ``ragkv.commands``.

They are functions with typer's options, or a ``typer.Typer``. Entry points are read only for a
command that needs them.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from ragkv.config.extensions import loaded_entry, not_installed
from ragkv.errors import MissingDependencyError

COMMANDS = "ragkv.commands"
_OF_RAGKV_BENCH = ("bench", "calibrate", "eval", "tune-auxiliary")
_log = logging.getLogger(__name__)


def plugin_names() -> list[str]:
    """Return the commands that can be loaded; a warning names the rest."""
    names = []
    for entry in sorted(entry_points(group=COMMANDS)):
        try:
            _command(entry)
        except MissingDependencyError as error:
            _log.warning("%s", error)
        else:
            names.append(entry.name)
    return names


def plugin_command(name: str) -> Any:
    """Return a click command by name; None if no package has it.

    Raises
    ------
    MissingDependencyError
        Its package is not installed or cannot be loaded.
    """
    for entry in entry_points(group=COMMANDS, name=name):
        return _command(entry)
    if name in _OF_RAGKV_BENCH:
        raise not_installed(f"ragkv {name}", "ragkv-bench", "benchmarks")
    return None


def _command(entry: EntryPoint) -> Any:
    found = loaded_entry(entry)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(entry.name)(function)
    command = typer.main.get_command(found)
    command.name = entry.name
    return command
