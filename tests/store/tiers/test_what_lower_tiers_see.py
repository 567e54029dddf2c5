"""A tier below the device's judges an entry by all requests for it, the device's too."""

from __future__ import annotations

import pytest
from store_entries import FINGERPRINT, make_entry, without_syncs  # noqa: F401

from ragkv.store import MemoryStore, TieredStore
from ragkv.store.tiers.memory import size_of

pytestmark = pytest.mark.usefixtures("without_syncs")
SIZE = size_of(make_entry("hot"))


def test_what_was_hot_on_the_device_is_admitted_to_memory() -> None:
    device = MemoryStore(SIZE, admission=True)
    memory = MemoryStore(2 * SIZE + 64, admission=True)
    below = MemoryStore(1 << 30)
    store = TieredStore(memory, below, device=device)
    for text in ("hot", "warm"):
        store.put(make_entry(text), FINGERPRINT)
    assert (list(device.texts()), list(memory.texts())) == (["hot"], ["warm"])
    below.put(make_entry("new"), FINGERPRINT)
    for text, times in (("hot", 10), ("warm", 3), ("new", 12)):
        for _ in range(times):
            assert store.get(text, FINGERPRINT).entry is not None
    assert list(device.texts()) == ["new"]
    assert sorted(memory.texts()) == ["hot", "new"]
