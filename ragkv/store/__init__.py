"""Stores of chunk caches: in memory, on disk, on a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ragkv.config import MEMORY, StoreConfig
from ragkv.errors import ConfigError
from ragkv.model.memory import budget_of, free_bytes
from ragkv.store.backends import open_backend
from ragkv.store.backends.backend import Backend
from ragkv.store.backends.memory import MemoryBackend
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.tiered import TieredStore
from ragkv.store.tiers.eviction import Eviction
from ragkv.store.tiers.tier import MemoryTier
from ragkv.store.types import Changes, EntryInfo, Found, Terms

__all__ = [
    "Changes",
    "ChunkStore",
    "EntryInfo",
    "Found",
    "Terms",
    "TieredStore",
    "open_chunk_store",
    "open_store",
]

_DEVICE_SHARE, _DEVICE_BYTES = 8, 1 << 30
"""Default of the device tier: one eighth of a GPU's free memory, or bytes elsewhere."""

_CPU = torch.device("cpu")


def open_store(
    config: StoreConfig | str | Path | None,
    namespace: str = "default",
    *,
    device: torch.device = _CPU,
    costs: Callable[[int, int], float] | None = None,
) -> TieredStore:
    """Open the store of one namespace, with its tiers.

    Parameters
    ----------
    config
        A folder; ``":memory:"``; a URL: ``redis://host:port/db``, ``valkey://…``,
        ``s3://bucket/prefix``; None for the user's cache folder; or a StoreConfig.
    namespace
        Any text. A store sees only the entries of its namespace.
    device
        The model's device. Unless it is the CPU, it has a tier before the memory's.
    costs
        Cost of computing ``new`` tokens after ``cached`` ones, by which full tiers rank entries
        for eviction. ``None`` counts tokens.

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
    make = partial(MemoryTier, costs=costs, admission=True)
    pin = device.type == "cuda"
    on_device = _device_bytes(config, device)
    tiers = [make(on_device, device=device)] if on_device else []
    if str(config.path) == MEMORY:
        budget: int | None = budget_of(config.memory_bytes)
        backend: Backend = MemoryBackend(budget=budget, pin=pin, private=True)
    else:
        budget = config.disk_bytes
        tiers.append(make(budget_of(config.memory_bytes), pin=pin))
        backend = open_backend(config, namespace)
    eviction = None if budget is None or config.read_only else Eviction(budget, costs)
    return TieredStore(
        backend, namespace, tiers=tiers, read_only=config.read_only, eviction=eviction
    )


def open_chunk_store(config: StoreConfig, namespace: str = "default") -> ChunkStore:
    """Open a namespace without tiers and eviction; raises as :func:`open_store`."""
    return ChunkStore(open_backend(config, namespace), namespace, read_only=config.read_only)


def _device_bytes(config: StoreConfig, device: torch.device) -> int:
    """Return the budget of the device tier, 0 for none."""
    if config.device_bytes is not None:
        return int(config.device_bytes)
    if device.type == "cuda":
        return free_bytes(device) // _DEVICE_SHARE
    return 0 if device.type == "cpu" else _DEVICE_BYTES
