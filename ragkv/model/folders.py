"""Folders: check a model's before transformers tries the hub, and find the user's cache."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from platformdirs import user_cache_path

from ragkv.errors import ConfigError, ModelNotFoundError

_CONFIGS = ("config.json", "adapter_config.json")
_INSIDE = ("*", "snapshots/*")
"""Places of models inside a folder that is not a model's."""
_MOST_NAMED = 8
_HOMELESS = (
    "this user has no home folder: set HOME (or XDG_CACHE_HOME, for the cache folder) to a "
    "writable folder, or give an absolute path"
)


def check_place(name: str | Path, *, configured: bool = True) -> Path | None:
    """Return the model's folder; None for a hub name.

    Parameters
    ----------
    configured
        Whether the folder must have a ``config.json``.

    Raises
    ------
    ModelNotFoundError
        It must be a folder and is missing, is a file, or contains no model; the message lists what
        is there.
    """
    path = expanded(name)
    if path.is_file():
        raise ModelNotFoundError(f"{path} is a file: give the model's folder, {path.parent}")
    if path.is_dir():
        if configured and not any((path / each).is_file() for each in _CONFIGS):
            raise ModelNotFoundError(f"The folder {path} has no config.json{_inside(path)}")
        return path
    if _is_path(name):
        raise ModelNotFoundError(f"There is no folder {path}{near(path)}")
    return None


def expanded(path: str | Path) -> Path:
    """Return a path with ``~`` expanded; ConfigError if the user has no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {_HOMELESS}") from error


def cache_folder() -> Path:
    """Return the user's cache folder for ragkv; raises as :func:`expanded`."""
    try:
        return user_cache_path("ragkv").expanduser()
    except RuntimeError as error:
        raise ConfigError(f"the cache folder: {_HOMELESS}") from error


def near(path: Path) -> str:
    """Return the end of a sentence: the contents of the nearest existing folder."""
    missing = path.absolute()
    while not missing.parent.is_dir():
        missing = missing.parent
    folders = _folders(missing.parent)
    close = difflib.get_close_matches(missing.name, folders, 1)
    if close:
        return f": did you mean {missing.parent / close[0]}?"
    found = f"the folders {_named(folders)}" if folders else "no folder"
    return f": {missing.parent} has {found}."


def _is_path(name: str | Path) -> bool:
    """Whether this cannot be a name on the hub, which has at most one slash."""
    text = os.fspath(name)
    return (
        isinstance(name, Path)
        or text.startswith((".", "~", os.sep))
        or text.endswith("/")
        or text.count("/") > 1
        or "\\" in text
    )


def _inside(path: Path) -> str:
    models = sorted({each.parent for at in _INSIDE for each in path.glob(f"{at}/config.json")})
    if models:
        return f": did you mean {models[-1]}?"
    there = sorted(each.name for each in path.iterdir())
    return f": it has {_named(there)}." if there else ": it is empty."


def _folders(path: Path) -> list[str]:
    try:
        return sorted(each.name for each in path.iterdir() if each.is_dir())
    except OSError:
        return []


def _named(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
