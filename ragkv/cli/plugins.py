"""Commands that other packages add by entry points of the group ``ragkv.commands``.

An entry is a function with typer's options, or a ``typer.Typer`` with several. Nothing is looked up
for a command of ragkv's own.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from ragkv.errors import MissingDependencyError

GROUP = "ragkv.commands"
_OF_RAGKV_BENCH = ("bench", "calibrate", "eval", "tune-auxiliary")
_log = logging.getLogger(__name__)


def plugin_names() -> list[str]:
    """Return the commands that can be loaded; others are named in a warning."""
    names = []
    for entry in sorted(entry_points(group=GROUP)):
        try:
            _load(entry)
        except MissingDependencyError as error:
            _log.warning("%s", error)
        else:
            names.append(entry.name)
    return names


def plugin_command(name: str) -> Any:
    """Return the click command of a name; None where no package is known to have it.

    Raises
    ------
    MissingDependencyError
        Its package is not installed or cannot be loaded.
    """
    for entry in entry_points(group=GROUP, name=name):
        return _load(entry)
    if name in _OF_RAGKV_BENCH:
        raise MissingDependencyError(
            f"ragkv {name} is in a package of its own: pip install ragkv-bench, or in a clone "
            "pip install ./benchmarks"
        )
    return None


def _load(entry: EntryPoint) -> Any:
    try:
        found = entry.load()
    except Exception as error:  # another package's import may raise anything
        package = entry.value if entry.dist is None else entry.dist.name
        raise MissingDependencyError(
            f"ragkv {entry.name} cannot be loaded from {package}: {error!r}. Install it again, or "
            "uninstall it"
        ) from error
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(entry.name)(function)
    command = typer.main.get_command(found)
    command.name = entry.name
    return command
