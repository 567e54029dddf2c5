"""A ChunkStore in a folder, by its path: short for tests."""

from __future__ import annotations

from pathlib import Path

from ragkv import RagKV
from ragkv.config import StoreConfig
from ragkv.store.backends import open_backend
from ragkv.store.backends.disk import DiskBackend
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.over import StoreOver


class DiskStore(ChunkStore):
    """A :class:`ChunkStore` in a folder; the arguments are StoreConfig's and ChunkStore's."""

    backend: DiskBackend

    def __init__(
        self,
        path: str | Path,
        namespace: str = "default",
        *,
        budget: int | None = None,
        read_only: bool = False,
        mapped: bool = True,
    ) -> None:
        config = StoreConfig(path, disk_bytes=budget, read_only=read_only)
        backend = open_backend(config, namespace)
        super().__init__(backend, namespace, read_only=read_only, mapped=mapped)

    @property
    def folder(self) -> Path:
        """The namespace's folder."""
        return self.backend.folder


def disk_of(engine: RagKV) -> DiskBackend:
    """Return what holds the bytes of an engine whose store is a folder."""
    store = engine._store
    while isinstance(store, StoreOver):
        store = store.below
    assert isinstance(store, ChunkStore)
    assert isinstance(store.backend, DiskBackend)
    return store.backend
