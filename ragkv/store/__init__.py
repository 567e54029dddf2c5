"""4 fetch: where chunk caches are kept: in memory, on disk, on a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ragkv.config import MEMORY, StoreConfig
from ragkv.errors import ConfigError
from ragkv.store.backends import open_backend
from ragkv.store.base import Changes, EntryInfo, Found, Store, Terms
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.tiers.evicting import EvictingStore
from ragkv.store.tiers.memory import MemoryStore
from ragkv.store.tiers.tiered import TieredStore

__all__ = [
    "Changes",
    "ChunkStore",
    "EntryInfo",
    "Found",
    "MemoryStore",
    "Store",
    "Terms",
    "TieredStore",
    "open_chunk_store",
    "open_store",
]

DEVICE_BYTES = 1 << 30
"""Budget of the device tier where the configuration names none."""

_CPU = torch.device("cpu")


def open_store(
    config: StoreConfig | str | Path | None,
    namespace: str = "default",
    *,
    device: torch.device = _CPU,
    costs: Callable[[int, int], float] | None = None,
) -> Store:
    """Open the store of one namespace, with its tiers.

    Parameters
    ----------
    config
        A folder; ``":memory:"``; a URL: ``redis://host:port/db``, ``valkey://…``,
        ``s3://bucket/prefix``; None for the user's cache folder; or a StoreConfig.
    namespace
        Any text. Entries of other namespaces are never seen.
    device
        The model's: unless it is the CPU, a tier there comes before the memory.
    costs
        What computing ``(cached, new)`` tokens takes, by which entries are weighed that a full
        tier evicts. ``None`` counts tokens.

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
        return with_tiers(config, None, device, costs)
    has_tiers = config.memory_bytes > 0 or _device_bytes(config, device) > 0
    return with_tiers(
        config, open_chunk_store(config, namespace, mapped=not has_tiers), device, costs
    )


def open_chunk_store(
    config: StoreConfig, namespace: str = "default", *, mapped: bool = False
) -> ChunkStore:
    """Open a namespace without tiers; raises as :func:`open_store`.

    ``mapped`` as for :class:`ChunkStore`.
    """
    backend = open_backend(config, namespace)
    return ChunkStore(backend, namespace, read_only=config.read_only, mapped=mapped)


def with_tiers(
    config: StoreConfig,
    below: Store | None,
    device: torch.device,
    costs: Callable[[int, int], float] | None = None,
) -> Store:
    """Return the configured tiers over a store; over None, they are the whole store."""
    make = partial(MemoryStore, costs=costs)
    # a tier may reject an entry; a store of its own may not
    memory = make(
        int(config.memory_bytes), pinned=device.type == "cuda", admission=below is not None
    )
    on_device = None
    if budget := _device_bytes(config, device):
        on_device = make(budget, device=device, admission=True)
    if below is None:
        return memory if on_device is None else TieredStore(on_device, memory)
    store = TieredStore(memory, below, device=on_device)
    if config.disk_bytes is None or config.read_only:
        return store
    return EvictingStore(store, config.disk_bytes, costs=costs)


def _device_bytes(config: StoreConfig, device: torch.device) -> int:
    """Return the budget of the device tier, 0 for none."""
    if config.device_bytes is not None:
        return int(config.device_bytes)
    return 0 if device.type == "cpu" else DEVICE_BYTES
