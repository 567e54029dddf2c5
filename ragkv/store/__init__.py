"""4 fetch: where chunk caches are kept: in memory, on disk, on a server."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import torch

from ragkv.config import MEMORY, StoreConfig
from ragkv.errors import ConfigError
from ragkv.store.backends import is_url, open_url
from ragkv.store.backends.base import Backend
from ragkv.store.backends.encrypted import EncryptedBackend
from ragkv.store.backends.keys import key_from_environment
from ragkv.store.base import EntryInfo, Lookup, Store
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.disk import DiskStore, folder_name, open_folder
from ragkv.store.tiers.memory import MemoryStore
from ragkv.store.tiers.stack import device_bytes, with_tiers
from ragkv.store.tiers.tiered import TieredStore

__all__ = [
    "ChunkStore",
    "DiskStore",
    "EntryInfo",
    "Lookup",
    "MemoryStore",
    "Store",
    "TieredStore",
    "folder_of",
    "open_chunk_store",
    "open_store",
]

_CPU = torch.device("cpu")


def open_store(
    config: StoreConfig | str | Path | None,
    namespace: str = "default",
    *,
    device: torch.device = _CPU,
) -> Store:
    """Open the store of one namespace.

    Parameters
    ----------
    config
        A folder; ``":memory:"``; a URL: ``redis://host:port/db``, ``valkey://…``,
        ``s3://bucket/prefix``; None for the user's cache folder; or a StoreConfig.
    namespace
        Any text. Entries of other namespaces are never seen.
    device
        The model's: where it is not the CPU, a tier there comes before the memory.

    Raises
    ------
    StoreError
        The place cannot be used.
    MissingDependencyError
        A package that the place needs is not installed; the message names the extra.
    ConfigError
        The URL or a setting does not fit.
    """
    if not isinstance(config, StoreConfig):
        config = StoreConfig(path=config)
    if not isinstance(namespace, str):
        raise ConfigError(f"namespace must be a string, not {type(namespace).__name__}")
    if config.path == MEMORY:
        return with_tiers(config, None, device)
    with_copies = config.memory_bytes > 0 or device_bytes(config, device) > 0
    return with_tiers(config, open_chunk_store(config, namespace, mapped=not with_copies), device)


def open_chunk_store(
    config: StoreConfig, namespace: str = "default", *, mapped: bool = False
) -> ChunkStore:
    """Open what :func:`open_store` puts its tiers over, by itself.

    ``mapped`` as for :class:`ChunkStore`.

    Raises
    ------
    StoreError, MissingDependencyError, ConfigError
        As for :func:`open_store`.
    """
    if config.path == MEMORY:
        raise ConfigError("a store in memory is its process's own: name a folder or a URL")
    folder, budget, read_only = folder_of(config.path), config.disk_bytes, config.read_only
    master = key_from_environment() if config.encrypt else None
    backend: Backend
    if folder is None:
        if budget is not None:
            raise ConfigError("disk_bytes bounds folders; set the limit of a server there")
        backend = open_url(str(config.path), folder_name(namespace))
    elif master is None:
        return DiskStore(folder, namespace, budget=budget, read_only=read_only, mapped=mapped)
    else:
        backend = open_folder(folder, namespace, budget=budget, read_only=read_only)
    if master is not None:
        backend = EncryptedBackend(backend, namespace, master)
    return ChunkStore(backend, namespace, read_only=read_only, mapped=mapped)


def folder_of(path: str | Path | None) -> Path | None:
    """Return the folder of a store's place, which None names, too; None for a URL."""
    if is_url(path):
        return None
    if path is not None and not str(path):
        raise ConfigError("the store's folder has no name (an unset variable?)")
    return Path(path or Path(platformdirs.user_cache_dir("ragkv")) / "store")
