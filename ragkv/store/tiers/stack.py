"""Which stores stand over which: device, memory, below."""

from __future__ import annotations

from functools import partial

import torch

from ragkv.config import StoreConfig
from ragkv.store.base import Store
from ragkv.store.tiers.evicting import EvictingStore
from ragkv.store.tiers.memory import MemoryStore
from ragkv.store.tiers.tiered import TieredStore

DEVICE_BYTES = 1 << 30
"""Budget of the device tier where the configuration names none."""


def device_bytes(config: StoreConfig, device: torch.device) -> int:
    """Return the budget of the device tier, 0 for none."""
    if config.device_bytes is not None:
        return int(config.device_bytes)
    return 0 if device.type == "cpu" else DEVICE_BYTES


def with_tiers(config: StoreConfig, below: Store | None, device: torch.device) -> Store:
    """Put the configured tiers over a store; over None, they are all there is.

    Parameters
    ----------
    device
        The model's.
    """
    make = partial(MemoryStore, policy=config.policy, costs=config.costs)
    # a tier may turn an entry away; what is all there is may not
    memory = make(
        int(config.memory_bytes), pinned=device.type == "cuda", admission=below is not None
    )
    near = None
    if budget := device_bytes(config, device):
        near = make(budget, device=device, admission=True)
    if below is None:
        return memory if near is None else TieredStore(near, memory)
    store = TieredStore(memory, below, device=near)
    if not config.evict or config.disk_bytes is None:
        return store
    return EvictingStore(store, config.disk_bytes, policy=config.policy, costs=config.costs)
