"""A store in a folder: one namespace's entries on a disk that several processes share."""

from __future__ import annotations

import re
from pathlib import Path

from blake3 import blake3

from ragkv.errors import StoreError
from ragkv.store.backends.disk import DiskBackend
from ragkv.store.chunk_store import ChunkStore


class DiskStore(ChunkStore):
    """A :class:`ChunkStore` in a folder.

    Parameters
    ----------
    path
        The store's folder, above the namespaces' folders.
    namespace
        Any text.
    budget
        Bytes that the namespace's files may take; None for no limit.
    read_only
        Write nothing: no entry, no lock file. Damaged entries stay where they are.
    mapped
        See :class:`ChunkStore`.

    Raises
    ------
    StoreError
        The folder cannot be used, belongs to another namespace or another ragkv.
    """

    backend: DiskBackend

    def __init__(
        self,
        path: str | Path,
        namespace: str = "default",
        *,
        budget: float | None = None,
        read_only: bool = False,
        mapped: bool = True,
    ) -> None:
        backend = open_folder(path, namespace, budget=budget, read_only=read_only)
        super().__init__(backend, namespace, read_only=read_only, mapped=mapped)

    @property
    def folder(self) -> Path:
        """The namespace's folder."""
        return self.backend.folder


def open_folder(
    path: str | Path, namespace: str, *, budget: float | None = None, read_only: bool = False
) -> DiskBackend:
    """Open a namespace's folder; the arguments are those of :class:`DiskStore`."""
    folder = namespace_folder(path, namespace)
    if read_only and not folder.parent.is_dir():
        raise StoreError(f"there is no store at {folder.parent}")
    return DiskBackend(folder, budget=budget, read_only=read_only)


def namespace_folder(path: str | Path, namespace: str) -> Path:
    """Return where a namespace lies in a store's folder."""
    return Path(path).expanduser().absolute() / folder_name(namespace)


def folder_name(namespace: str) -> str:
    """Return the one folder name of a namespace: readable, and distinct by its hash."""
    digest = blake3(namespace.encode("utf-8", "surrogatepass")).hexdigest(length=16)
    return f"{re.sub('[^A-Za-z0-9]+', '-', namespace)[:32]}-{digest}"
