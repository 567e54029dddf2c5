"""Tiers over a store: budgets, swapping out once, deletions below, eviction below."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from disk_store import tiered
from store_entries import FINGERPRINT, OTHER, make_entry, put_texts, same, texts_in, without_syncs  # noqa: F401

from ragkv import StoreConfig
from ragkv.errors import ConfigError, StoreFullError
from ragkv.store import ChunkStore, TieredStore, open_store
from ragkv.store.backends.memory import MemoryBackend, Place
from ragkv.store.operate import verify
from ragkv.store.tiers.tier import MemoryTier, size_of
from ragkv.store.types import Terms

pytestmark = pytest.mark.usefixtures("without_syncs")
SIZE = size_of(make_entry("a"))


# ---- device over memory over below


def tiers(device: int, memory: int) -> TieredStore:
    return tiered(MemoryBackend(), device * SIZE, memory * SIZE)


def test_what_leaves_the_device_is_copied_to_memory_once():
    store = tiers(2, 4)
    device, memory = store.tiers
    copies: list[str] = []
    keep = memory.put
    memory.put = lambda entry, *rest: (
        copies.append(entry.text),
        keep(entry, *rest),
    )[1]
    put_texts(store, "abc")
    assert (texts_in(device), texts_in(memory), copies) == (["b", "c"], ["a"], ["a"])
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))  # b leaves
    assert (texts_in(device), texts_in(memory), copies) == (["a", "c"], ["a", "b"], ["a", "b"])
    for text in "babcab":
        assert same(store.get(text, FINGERPRINT).entry, make_entry(text))
    assert copies == ["a", "b", "c"]  # each once, however often it left
    assert texts_in(memory) == ["a", "b", "c"]


def test_an_entry_is_on_the_device_in_its_tier_alone():
    store = tiered(MemoryBackend(), MemoryTier(1 << 20, device="meta"), 1 << 20)
    store.put(make_entry("a"), FINGERPRINT)
    entry = store.get("a", FINGERPRINT).entry
    assert entry is not None
    assert entry.keys.device.type == entry.values.device.type == "meta"
    store.tiers[0].delete("a")
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))


def test_a_put_replaces_what_the_tiers_hold():
    store = tiers(1, 3)
    put_texts(store, "ab")
    assert texts_in(store.tiers[-1]) == ["a"]
    longer = make_entry("a", tokens=9)
    store.put(longer, FINGERPRINT)
    for text in "aba":
        store.get(text, FINGERPRINT)
    assert same(store.get("a", FINGERPRINT).entry, longer)


def test_what_a_device_has_no_room_for_goes_to_memory():
    store = tiers(1, 40)
    large = make_entry("large", tokens=100)
    store.put(large, FINGERPRINT)
    assert texts_in(store.tiers[-1]) == ["large"]
    assert store.load_seconds("large", FINGERPRINT, 1) == 0.0


def test_expiry_holds_in_every_tier(monkeypatch):
    store = tiers(1, 3)
    now = time.time()
    put_texts(store, "ab", Terms(expires_at=now + 1000))
    store.put(make_entry("c"), FINGERPRINT)
    monkeypatch.setattr(time, "time", lambda: now + 1001)
    assert [store.get(text, FINGERPRINT).reason for text in "abc"] == ["expired", "expired", ""]
    assert store.retain("c", FINGERPRINT, Terms(expires_at=now + 2000))
    assert store.gc() == 2
    assert store.get("a", FINGERPRINT).reason == "absent"


LARGE = size_of(make_entry("a", tokens=40))


def hammer(store: ChunkStore, seed: int) -> list[str]:
    """Ask for chunks, put what is missing, delete some; return what was wrong."""
    draw, wrong = random.Random(seed), []
    for _ in range(150):
        text = str(min(int(draw.expovariate(0.1)), 80))
        found = store.get(text, FINGERPRINT).entry
        if found is None:
            with suppress(StoreFullError):  # other threads may take the room
                store.put(make_entry(text, tokens=40), FINGERPRINT)
        elif not same(found, make_entry(text, tokens=40)):
            wrong.append(text)
        if draw.random() < 0.05:
            store.delete(text)
    return wrong


def test_budgets_hold_under_load():
    config = StoreConfig(":memory:", memory_bytes=30_000, device_bytes=4 * LARGE)
    store = open_store(config)
    backend = store.backend
    assert isinstance(backend, MemoryBackend)
    places = [*store.tiers, backend]
    over: list[int] = []
    done = threading.Event()

    def watch():
        while not done.is_set():
            over.extend(p.nbytes for p in places if p.nbytes > p.budget + LARGE)
            time.sleep(0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            wrong = [text for texts in pool.map(partial(hammer, store), range(8)) for text in texts]
    finally:
        done.set()
    watcher.join()
    assert (over, wrong) == ([], [])
    assert all(0 < place.nbytes <= place.budget for place in places)
    assert 2 <= len(texts_in(store)) < 6


def test_what_was_hot_on_the_device_is_admitted_to_memory():
    """A tier below the device's judges an entry by all requests for it, the device's too."""
    size = size_of(make_entry("hot"))
    device, memory = (MemoryTier(n * size + 64, admission=True) for n in (1, 2))
    backend = MemoryBackend()
    store = tiered(backend, device, memory)
    put_texts(store, ("hot", "warm"))
    assert (texts_in(device), texts_in(memory)) == (["hot"], ["warm"])
    ChunkStore(backend).put(make_entry("new"), FINGERPRINT)
    for text, times in (("hot", 10), ("warm", 3), ("new", 12)):
        for _ in range(times):
            assert store.get(text, FINGERPRINT).entry is not None
    assert texts_in(device) == ["new"]
    assert texts_in(memory) == ["hot", "new"]


def test_a_scan_leaves_the_hot_set_in_memory():
    store = tiered(MemoryBackend(), MemoryTier(5 * SIZE, admission=True))
    for number in range(100):  # ingestion is such a scan, too
        store.put(make_entry(str(number)), FINGERPRINT)
    for _ in range(3):
        for text in "01234":
            store.get(text, FINGERPRINT)
    for number in range(5, 100):
        assert store.get(str(number), FINGERPRINT).entry is not None
    assert texts_in(store.tiers[-1]) == list("01234")


# ---- what others delete below


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[TieredStore, TieredStore]]:
    """Two processes' views of one folder."""
    stores = open_store(tmp_path), open_store(tmp_path)
    yield stores
    for store in stores:
        store.close()


def test_what_another_deletes_leaves_this_ones_memory(two):
    mine, theirs = two
    for text in "abcd":
        mine.put(make_entry(text), FINGERPRINT, Terms("d" if text == "d" else None))
    number, _, _ = mine.changes(0)
    theirs.delete("a")
    theirs.delete("b")
    theirs.put(make_entry("b"), FINGERPRINT)
    theirs.forget_document("d")
    moved, _, removed = mine.changes(number)
    assert moved > number
    assert sorted(removed) == ["a", "b", "d"]  # b was put again
    assert [mine.get(text, FINGERPRINT).reason for text in "abcd"] == ["absent", "", "", "absent"]
    assert mine.changes(moved)[0] == moved
    assert mine.changes(moved).removed == []


def test_what_another_puts_again_is_read_again(two, monkeypatch):
    mine, theirs = two
    now = time.time()
    mine.put(make_entry("a"), FINGERPRINT)
    number, _, _ = mine.changes(0)
    theirs.delete("a")
    theirs.put(make_entry("a"), FINGERPRINT, Terms(expires_at=now + 10))
    mine.changes(number)
    assert mine.get("a", FINGERPRINT).expires_at == now + 10
    monkeypatch.setattr(time, "time", lambda: now + 10)
    assert mine.get("a", FINGERPRINT).reason == "expired"


def test_a_deletion_that_left_the_log_empties_the_tiers(two):
    mine, theirs = two
    put_texts(mine, "ab")
    number, _, _ = mine.changes(0)
    theirs.delete("a")
    put_texts(theirs, "cd")
    theirs.catalog.compact_log(kept=2)
    moved, texts, removed = mine.changes(number)
    assert texts == ["c", "d"]
    assert sorted(removed) == ["a", "c", "d"]  # c and d may have been put again
    assert [mine.get(text, FINGERPRINT).reason for text in "ab"] == ["absent", ""]
    assert mine.changes(moved).removed == []
    assert verify(theirs).problems == []


def test_a_document_of_ones_own_leaves_memory_at_once(two):
    mine, _ = two
    put_texts(mine, "abc", Terms("d"))
    assert mine.keep_only("d", ["b"]) == 2
    assert [mine.get(text, FINGERPRINT).reason for text in "abc"] == ["absent", "", "absent"]


def test_a_place_that_was_emptied_empties_the_tiers():
    backend = MemoryBackend()
    store = tiered(backend)
    store.put(make_entry("a"), FINGERPRINT)
    store.changes(0)
    backend.place = Place()
    store.changes(1)
    assert store.get("a", FINGERPRINT).reason == "absent"


def test_a_lossy_codec_gives_this_process_what_it_gives_others(tmp_path):
    entry, fingerprint = make_entry("one", tokens=40), replace(FINGERPRINT, codec="int8")
    config = StoreConfig(tmp_path, codec="int8")
    with closing(open_store(config)) as store:
        store.put(entry, fingerprint)
        mine = store.get("one", fingerprint).entry
    with closing(open_store(config)) as other:
        theirs = other.get("one", fingerprint).entry
    assert mine is not None
    assert theirs is not None
    assert same(mine, theirs)
    assert not torch.equal(mine.keys, entry.keys)
    with pytest.raises(ConfigError, match="entries in memory are not encoded"):
        StoreConfig(":memory:", codec="int8")
