"""A bounded store evicts chunks for new ones."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from store_entries import FINGERPRINT, OTHER, make_entry, put_texts, same, texts_in, without_syncs  # noqa: F401

from ragkv import StoreConfig
from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreFullError
from ragkv.store import ChunkStore, TieredStore, open_store
from ragkv.store.backends.backend import Bytes, length_of
from ragkv.store.backends.memory import MemoryBackend
from ragkv.store.catalog import KEPT_CHANGES
from ragkv.store.entry.format import encode
from ragkv.store.names import digest_of_text, parse_entry_key
from ragkv.store.tiers.eviction import Eviction
from ragkv.store.tiers.tier import MemoryTier

pytestmark = pytest.mark.usefixtures("without_syncs")


ROOM = length_of(encode(make_entry("a", tokens=40), FINGERPRINT)) + 20


def evicting(entries: float, backend: type[MemoryBackend] = MemoryBackend) -> TieredStore:
    budget = int(entries * ROOM)
    return TieredStore(
        backend(budget=budget), tiers=[MemoryTier(1 << 20)], eviction=Eviction(budget)
    )


def large(text: str, tokens: int = 40) -> ChunkKV:
    return make_entry(text, tokens=tokens)


def test_the_store_makes_room_where_it_was_asked_to():
    store = evicting(3)
    put_texts(store, "abc", tokens=40)
    seen, _, _ = store.changes(0)
    assert store.get("a", FINGERPRINT).entry is not None  # from memory, and a use all the same
    store.put(large("d"), FINGERPRINT)
    assert texts_in(store) == ["a", "c", "d"]
    assert store.get("b", FINGERPRINT).reason == "absent"
    assert texts_in(store.tiers[0]) == ["a", "c", "d"]
    assert (store.was_evicted("b"), store.was_evicted("a")) == (True, False)
    moved, texts, _ = store.changes(seen)
    assert texts == ["d"]
    assert store.changes(seen).removed == ["b"]  # finders forget it
    assert moved > seen
    store.put(large("e", tokens=80), FINGERPRINT)
    assert texts_in(store) == ["d", "e"]  # a is as old as d, and was used before it


def test_nothing_leaves_for_what_would_never_fit():
    store = evicting(3)
    put_texts(store, "abc", tokens=40)
    with pytest.raises(StoreFullError, match="raise memory_bytes"):
        store.put(large("d", tokens=1000), FINGERPRINT)
    assert texts_in(store) == ["a", "b", "c"]


def test_an_entry_does_not_leave_for_itself():
    store = evicting(2)
    store.put(large("a"), FINGERPRINT)
    store.put(large("a"), OTHER)
    with pytest.raises(StoreFullError):
        store.put(large("a", tokens=80), FINGERPRINT)
    assert same(store.get("a", FINGERPRINT).entry, large("a"))
    store.delete("a")
    store.put(large("b"), FINGERPRINT)
    assert texts_in(store) == ["b"]


def test_evictions_leave_no_more_rows_than_are_kept():
    store = open_store(StoreConfig(":memory:", memory_bytes=60_000))
    for number in range(1500):
        store.put(large(str(number)), FINGERPRINT)
    assert len(list(store.backend.scan(""))) < 2 * KEPT_CHANGES + 100


class Queued(MemoryBackend):
    """Some puts come late: one each time that a chunk leaves."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget=budget)
        self.late: set[str] = set()
        self.waiting = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.landed = threading.Semaphore(0)

    def check_room(self, key: str, nbytes: int) -> None:
        name = parse_entry_key(key)
        if name is None or name[0] not in self.late:  # they look before the room is taken
            super().check_room(key, nbytes)

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        name = parse_entry_key(key)
        if name is None or name[0] not in self.late:
            super().put(key, parts)
            return
        self.waiting.release()
        self.late.discard(name[0])
        assert self.go_on.acquire(timeout=10)
        try:
            super().put(key, parts)
        finally:
            self.landed.release()

    def delete(self, key: str) -> bool:
        gone = super().delete(key)
        if gone and parse_entry_key(key) and self.waiting.acquire(blocking=False):
            self.go_on.release()
            assert self.landed.acquire(timeout=10)
        return gone


def test_room_that_others_take_is_made_again():
    late = list("abcdefgh")
    store = evicting(10, Queued)
    backend = store.backend
    assert isinstance(backend, Queued)
    for number in range(10):
        store.put(large(str(number)), FINGERPRINT)
    backend.late = set(map(digest_of_text, late))
    with ThreadPoolExecutor(len(late)) as pool:
        writing = [pool.submit(store.put, large(text), FINGERPRINT) for text in late]
        while backend.late:
            time.sleep(0.001)
        store.put(large("n"), FINGERPRINT)  # makes room nine times
        assert all(future.result() > 0 for future in writing)
    assert {"n", *late} <= set(texts_in(store))


def test_what_was_there_before_can_leave_too():
    backend = MemoryBackend(budget=int(3.2 * ROOM))
    others = ChunkStore(backend)
    put_texts(others, "abc", tokens=40)
    store = ChunkStore(backend, eviction=Eviction(3 * ROOM))
    assert store.get("a", FINGERPRINT).entry is not None
    store.put(large("d"), FINGERPRINT)
    assert "d" in texts_in(store)
    assert len(texts_in(store)) == 3
    for text in "efg":
        others.delete(texts_in(others)[0])  # another process
        others.put(large(text), FINGERPRINT)
        store.put(large(f"{text}{text}"), FINGERPRINT)
    assert len(texts_in(store)) == 3


def test_a_disk_makes_room_within_its_limit(tmp_path):
    config = StoreConfig(tmp_path, memory_bytes=0, disk_bytes=60_000)
    store = open_store(config)
    for number in range(30):
        assert store.put(make_entry(str(number), tokens=40), FINGERPRINT) > 0
        assert sum(info.nbytes for info in store.entries()) <= 60_000
    assert same(store.get("29", FINGERPRINT).entry, make_entry("29", tokens=40))
    assert 3 <= len(texts_in(store)) < 30
    store.close()


def test_a_limit_can_be_lowered(tmp_path):
    with closing(open_store(StoreConfig(tmp_path, memory_bytes=0))) as store:
        put_texts(store, map(str, range(30)), tokens=40)
        limit = sum(info.nbytes for info in store.entries()) // 10
    with closing(open_store(StoreConfig(tmp_path, memory_bytes=0, disk_bytes=limit))) as store:
        assert store.put(make_entry("new", tokens=40), FINGERPRINT) > 0
        assert "new" in texts_in(store)
        assert sum(info.nbytes for info in store.entries()) <= limit
