"""Costs that are known only after the tiers were made and filled."""

from __future__ import annotations

import torch
from store_entries import FINGERPRINT, make_entry

from ragkv import StoreConfig
from ragkv.store import MemoryStore, TieredStore, with_tiers
from ragkv.store.tiers.evicting import EvictingStore

CPU = torch.device("cpu")


def test_costs_that_come_late_reach_every_tier() -> None:
    """Tokens of a long chunk cost more: the short one leaves first, though it came last."""
    config = StoreConfig(
        "unused", memory_bytes=1 << 20, device_bytes=1 << 20, disk_bytes=1 << 20, evict=True
    )
    store = with_tiers(config, MemoryStore(1 << 20), CPU)
    assert isinstance(store, EvictingStore)
    assert isinstance(store.below, TieredStore)
    for text, tokens in (("long", 9), ("short", 3)):
        store.put(make_entry(text, tokens=tokens), FINGERPRINT)
        store.below.tiers[1].put(make_entry(text, tokens=tokens), FINGERPRINT)
    policies = [tier._policy for tier in (store, *store.below.tiers)]
    keys = ["long", ("long", FINGERPRINT), ("long", FINGERPRINT)]
    assert [policy.victims(1) for policy in policies] == [[key] for key in keys]
    store.set_costs(lambda _, new: float(new * new))
    assert [policy.victims(1) for policy in policies] == [
        ["short"],
        *[[("short", FINGERPRINT)]] * 2,
    ]
    store.put(make_entry("shortest", tokens=2), FINGERPRINT)  # and hold from then on
    assert policies[0].victims(1) == ["shortest"]
