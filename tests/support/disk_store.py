"""Stores by their place: short for tests."""

from pathlib import Path

from ragkv import RagKV
from ragkv.config import StoreConfig
from ragkv.store.backends import open_backend
from ragkv.store.backends.backend import Backend
from ragkv.store.backends.disk import DiskBackend
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.tiered import TieredStore
from ragkv.store.tiers.tier import MemoryTier


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


def tiered(
    place: Path | Backend, *tiers: int | MemoryTier, budget: int | None = None
) -> TieredStore:
    """Open a folder, or a backend, behind tiers; a number is the budget of one in memory."""
    if isinstance(place, Path):
        place = open_backend(StoreConfig(place, disk_bytes=budget), "default")
    made = [MemoryTier(tier) if isinstance(tier, int) else tier for tier in tiers]
    return TieredStore(place, tiers=made or [MemoryTier(1 << 20)])


def disk_of(engine: RagKV) -> DiskBackend:
    """Return what holds the bytes of an engine whose store is a folder."""
    backend = engine._store.backend
    assert isinstance(backend, DiskBackend)
    return backend
