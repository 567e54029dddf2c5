"""4 fetch: where chunk caches are kept, in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from ragkv.config import MEMORY, StoreConfig
from ragkv.store.base import Lookup, Store
from ragkv.store.disk import DiskStore
from ragkv.store.memory import MemoryStore
from ragkv.store.tiered import TieredStore

__all__ = ["DiskStore", "Lookup", "MemoryStore", "Store", "TieredStore", "open_store"]


def open_store(config: StoreConfig | str | Path | None, namespace: str = "default") -> Store:
    """Open the store of one namespace.

    Parameters
    ----------
    config
        A folder, ``":memory:"``, None for the user's cache folder, or a StoreConfig.
    namespace
        Any text. Entries of other namespaces are never seen.

    Raises
    ------
    StoreError
        The place cannot be used.
    """
    if not isinstance(config, StoreConfig):
        config = StoreConfig(path=config)
    memory = MemoryStore(int(config.memory_bytes))
    if config.path == MEMORY:
        return memory
    path = config.path
    if path is None:
        path = Path(platformdirs.user_cache_dir("ragkv")) / "store"
    disk = DiskStore(
        path,
        namespace,
        budget=config.disk_bytes,
        read_only=config.read_only,
        mapped=config.memory_bytes == 0,
    )
    return TieredStore(memory, disk)
