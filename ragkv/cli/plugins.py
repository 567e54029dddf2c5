"""Commands and functions of other packages, found by entry points.

The group ``ragkv.commands`` has commands: functions with typer's options, or a ``typer.Typer``. The
group ``ragkv.extensions`` has functions that options of ragkv's commands call. Entry points are
read only for a command or an option that needs them.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from ragkv.errors import MissingDependencyError

COMMANDS, EXTENSIONS = "ragkv.commands", "ragkv.extensions"
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
        raise _not_installed(f"ragkv {name}", "ragkv-bench", "benchmarks")
    return None


def extension(name: str, package: str) -> Any:
    """Return a package's function for an option.

    Raises
    ------
    MissingDependencyError
        The package is not installed or cannot be loaded.
    """
    for entry in entry_points(group=EXTENSIONS, name=name):
        return _load(entry)
    raise _not_installed(name, package, f"integrations/{name}")


def _not_installed(name: str, package: str, folder: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"{name} is in a separate package: pip install {package}, or in a clone "
        f"pip install ./{folder}"
    )


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # the import can raise anything
        package = entry.value if entry.dist is None else entry.dist.name
        raise MissingDependencyError(
            f"{entry.name} cannot be loaded from {package}: {error!r}. Install it again, or "
            "uninstall it"
        ) from error


def _command(entry: EntryPoint) -> Any:
    found = _load(entry)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(entry.name)(function)
    command = typer.main.get_command(found)
    command.name = entry.name
    return command
