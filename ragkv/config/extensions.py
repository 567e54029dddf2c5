"""Functions of other packages, found by the entry points ``ragkv.extensions``.

Entry points are read only for an option or an argument that needs them.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ragkv.errors import MissingDependencyError

EXTENSIONS = "ragkv.extensions"


def extension(name: str, package: str) -> Any:
    """Return a package's function.

    Raises
    ------
    MissingDependencyError
        The package is not installed or cannot be loaded.
    """
    for entry in entry_points(group=EXTENSIONS, name=name):
        return loaded_entry(entry)
    raise not_installed(name, package, f"integrations/{name}")


def not_installed(name: str, package: str, folder: str) -> MissingDependencyError:
    """Return the error for a package that is not installed; ``folder`` is its place in a clone."""
    return MissingDependencyError(
        f"{name} is in a separate package: pip install {package}, or in a clone "
        f"pip install ./{folder}"
    )


def loaded_entry(entry: EntryPoint) -> Any:
    """Import an entry point's object.

    Raises
    ------
    MissingDependencyError
        The import failed.
    """
    try:
        return entry.load()
    except Exception as error:  # the import can raise anything
        package = entry.value if entry.dist is None else entry.dist.name
        raise MissingDependencyError(
            f"{entry.name} cannot be loaded from {package}: {error!r}. Install it again, or "
            "uninstall it"
        ) from error
