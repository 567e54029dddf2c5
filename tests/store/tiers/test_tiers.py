"""Tiers over a store: budgets, swapping out once, deletions below, eviction below."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_entries import FINGERPRINT, OTHER, make_entry, same, without_syncs  # noqa: F401

from ragkv import StoreConfig
from ragkv.chunk.kv import ChunkKV
from ragkv.errors import ConfigError, StoreFullError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store import MemoryStore, Store, TieredStore, open_store, with_tiers
from ragkv.store.base import Terms
from ragkv.store.operate.inspect import verify
from ragkv.store.tiers.evicting import EvictingStore
from ragkv.store.tiers.memory import size_of

pytestmark = pytest.mark.usefixtures("without_syncs")
CPU = torch.device("cpu")
SIZE = size_of(make_entry("a"))


class Bounded(MemoryStore):
    """Raises at its limit instead of letting go, as disks do."""

    def put(self, entry: ChunkKV, fingerprint: Fingerprint, terms: Terms = Terms()) -> int:
        with self._lock:
            known = self._policy.size((entry.text, fingerprint))
            if self.nbytes - known + size_of(entry) > self.budget:
                raise StoreFullError("full")
        return super().put(entry, fingerprint, terms)


def texts_in(store: Store) -> list[str]:
    return sorted(store.texts())


# ---- device over memory over below


def tiers(device: int, memory: int) -> TieredStore:
    return TieredStore(
        MemoryStore(memory * SIZE), MemoryStore(1 << 30), device=MemoryStore(device * SIZE)
    )


def test_what_leaves_the_device_is_copied_to_memory_once() -> None:
    store = tiers(2, 4)
    device, memory = store.tiers
    copies: list[str] = []
    keep = memory.put_evicting
    memory.put_evicting = lambda entry, *rest: (  # type: ignore[method-assign]
        copies.append(entry.text),
        keep(entry, *rest),
    )[1]
    for text in "abc":
        store.put(make_entry(text), FINGERPRINT)
    assert (texts_in(device), texts_in(memory), copies) == (["b", "c"], ["a"], ["a"])
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))  # b leaves
    assert (texts_in(device), texts_in(memory), copies) == (["a", "c"], ["a", "b"], ["a", "b"])
    for text in "babcab":
        assert same(store.get(text, FINGERPRINT).entry, make_entry(text))
    assert copies == ["a", "b", "c"]  # each once, however often it left
    assert texts_in(memory) == ["a", "b", "c"]


def test_an_entry_is_on_the_device_in_its_tier_alone() -> None:
    store = TieredStore(
        MemoryStore(1 << 20), MemoryStore(1 << 20), device=MemoryStore(1 << 20, device="meta")
    )
    store.put(make_entry("a"), FINGERPRINT)
    entry = store.get("a", FINGERPRINT).entry
    assert entry is not None
    assert entry.keys.device.type == entry.values.device.type == "meta"
    store.tiers[0].delete("a")
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))


def test_a_put_replaces_what_the_tiers_hold() -> None:
    store = tiers(1, 3)
    for text in "ab":
        store.put(make_entry(text), FINGERPRINT)
    assert texts_in(store.memory) == ["a"]
    longer = make_entry("a", tokens=9)
    store.put(longer, FINGERPRINT)
    for text in "aba":
        store.get(text, FINGERPRINT)
    assert same(store.get("a", FINGERPRINT).entry, longer)


def test_what_a_device_has_no_room_for_goes_to_memory() -> None:
    store = tiers(1, 40)
    large = make_entry("large", tokens=100)
    store.put(large, FINGERPRINT)
    assert texts_in(store.memory) == ["large"]
    assert store.load_seconds("large", FINGERPRINT, 1) == 0.0


def test_expiry_holds_in_every_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    store = tiers(1, 3)
    now = time.time()
    for text in "ab":
        store.put(make_entry(text), FINGERPRINT, Terms(expires_at=now + 1000))
    store.put(make_entry("c"), FINGERPRINT)
    monkeypatch.setattr(time, "time", lambda: now + 1001)
    assert [store.get(text, FINGERPRINT).reason for text in "abc"] == ["expired", "expired", ""]
    assert store.load_seconds("a", FINGERPRINT, 1) == 0.0  # as the store below says
    assert store.retain("c", FINGERPRINT, Terms(expires_at=now + 2000))
    assert store.gc() == 2
    assert store.get("a", FINGERPRINT).reason == "absent"


def hammer(store: Store, seed: int) -> list[str]:
    """Ask for chunks, put what is missing, delete some; return what was wrong."""
    draw, wrong = random.Random(seed), []
    for _ in range(150):
        text = str(min(int(draw.expovariate(0.1)), 80))
        found = store.get(text, FINGERPRINT).entry
        if found is None:
            store.put(make_entry(text), FINGERPRINT)
        elif not same(found, make_entry(text)):
            wrong.append(text)
        if draw.random() < 0.05:
            store.delete(text)
    return wrong


def test_budgets_hold_under_load() -> None:
    below = Bounded(20 * SIZE)
    config = StoreConfig(
        "unused", memory_bytes=6 * SIZE, device_bytes=4 * SIZE, disk_bytes=20 * SIZE
    )
    store = with_tiers(config, below, CPU)
    assert isinstance(store, EvictingStore)
    tiered = store.below
    assert isinstance(tiered, TieredStore)
    places = [*tiered.tiers, below]
    over: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            over.extend(p.nbytes for p in places if p.nbytes > p.budget + SIZE)
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
    for place in places:
        assert 0 < place.nbytes == sum(info.nbytes for info in place.entries()) <= place.budget


def test_a_scan_leaves_the_hot_set_in_memory() -> None:
    config = StoreConfig("unused", memory_bytes=5 * SIZE)
    store = with_tiers(config, MemoryStore(1 << 30), CPU)
    assert isinstance(store, TieredStore)
    for number in range(100):  # ingestion is such a scan, too
        store.put(make_entry(str(number)), FINGERPRINT)
    for _ in range(3):
        for text in "01234":
            store.get(text, FINGERPRINT)
    for number in range(5, 100):
        assert store.get(str(number), FINGERPRINT).entry is not None
    assert texts_in(store.memory) == list("01234")


# ---- what others delete below


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Two processes' views of one folder."""
    stores = open_store(tmp_path), open_store(tmp_path)
    yield stores
    for store in stores:
        store.close()


def test_what_another_deletes_leaves_this_ones_memory(two: tuple[Store, Store]) -> None:
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


def test_what_another_puts_again_is_read_again(
    two: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_deletion_that_left_the_log_empties_the_tiers(two: tuple[Store, Store]) -> None:
    mine, theirs = two
    for text in "ab":
        mine.put(make_entry(text), FINGERPRINT)
    number, _, _ = mine.changes(0)
    theirs.delete("a")
    for text in "cd":
        theirs.put(make_entry(text), FINGERPRINT)
    theirs.below._catalog.compact_log(kept=2)
    moved, texts, removed = mine.changes(number)
    assert texts == ["c", "d"]
    assert sorted(removed) == ["a", "c", "d"]  # c and d may have been put again
    assert [mine.get(text, FINGERPRINT).reason for text in "ab"] == ["absent", ""]
    assert mine.changes(moved).removed == []
    assert verify(theirs.below).problems == []


def test_a_document_of_ones_own_leaves_memory_at_once(two: tuple[Store, Store]) -> None:
    mine, _ = two
    for text in "abc":
        mine.put(make_entry(text), FINGERPRINT, Terms("d"))
    assert mine.keep_only("d", ["b"]) == 2
    assert [mine.get(text, FINGERPRINT).reason for text in "abc"] == ["absent", "", "absent"]


def test_a_place_that_was_emptied_empties_the_tiers() -> None:
    below = MemoryStore(1 << 20)
    store = TieredStore(MemoryStore(1 << 20), below)
    store.put(make_entry("a"), FINGERPRINT)
    store.changes(0)
    store.below = MemoryStore(1 << 20)
    store.changes(1)
    assert store.get("a", FINGERPRINT).reason == "absent"


# ---- making room below


def evicting(entries: int, policy: str = "lru") -> EvictingStore:
    tiered = TieredStore(MemoryStore(1 << 20), Bounded(entries * SIZE))
    return EvictingStore(tiered, entries * SIZE, policy=policy)


def test_the_store_makes_room_where_it_was_asked_to() -> None:
    store = evicting(3)
    for text in "abc":
        store.put(make_entry(text), FINGERPRINT)
    seen, _, _ = store.changes(0)
    assert store.get("a", FINGERPRINT).entry is not None  # from memory, and a use all the same
    store.put(make_entry("d"), FINGERPRINT)
    assert texts_in(store) == ["a", "c", "d"]
    assert store.get("b", FINGERPRINT).reason == "absent"
    moved, texts, _ = store.changes(seen)
    assert texts == ["d"]
    assert store.changes(seen).removed == ["b"]  # finders forget it
    assert moved > seen
    store.put(make_entry("e", tokens=10), FINGERPRINT)
    assert texts_in(store) == ["d", "e"]


def test_nothing_leaves_for_what_would_never_fit() -> None:
    store = evicting(3)
    for text in "abc":
        store.put(make_entry(text), FINGERPRINT)
    with pytest.raises(StoreFullError):
        store.put(make_entry("d", tokens=1000), FINGERPRINT)
    assert texts_in(store) == ["a", "b", "c"]


def test_an_entry_does_not_leave_for_itself() -> None:
    store = evicting(2)
    store.put(make_entry("a"), FINGERPRINT)
    store.put(make_entry("a"), OTHER)
    with pytest.raises(StoreFullError):
        store.put(make_entry("a", tokens=9), FINGERPRINT)
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))
    store.delete("a")
    store.put(make_entry("b"), FINGERPRINT)
    assert texts_in(store) == ["b"]


class Queued(Bounded):
    """Some puts reach the disk late: one each time that a chunk leaves."""

    def __init__(self, budget: float, late: set[str]) -> None:
        super().__init__(budget)
        self.late = late
        self.waiting = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.landed = threading.Semaphore(0)

    def put(self, entry: ChunkKV, fingerprint: Fingerprint, terms: Terms = Terms()) -> int:
        if entry.text not in self.late:
            return super().put(entry, fingerprint, terms)
        self.waiting.release()
        self.late.discard(entry.text)
        assert self.go_on.acquire(timeout=10)
        try:
            return super().put(entry, fingerprint, terms)
        finally:
            self.landed.release()

    def delete(self, text: str) -> int:
        gone = super().delete(text)
        if self.waiting.acquire(blocking=False):
            self.go_on.release()
            assert self.landed.acquire(timeout=10)
        return gone


def test_room_that_others_take_is_made_again() -> None:
    late = list("abcdefgh")
    below = Queued(10 * SIZE, set(late))
    store = EvictingStore(below, below.budget)
    for number in range(10):
        store.put(make_entry(str(number)), FINGERPRINT)
    with ThreadPoolExecutor(len(late)) as pool:
        writing = [pool.submit(store.put, make_entry(text), FINGERPRINT) for text in late]
        while below.late:
            time.sleep(0.001)
        store.put(make_entry("n"), FINGERPRINT)  # makes room nine times
        assert all(future.result() > 0 for future in writing)
    assert texts_in(store) == sorted(["9", "n", *late])


def test_what_was_there_before_can_leave_too() -> None:
    below = Bounded(3 * SIZE + 10)
    for text in "abc":
        below.put(make_entry(text), FINGERPRINT)
    store = EvictingStore(below, below.budget)
    assert store.get("a", FINGERPRINT).entry is not None
    store.put(make_entry("d"), FINGERPRINT)
    assert "d" in texts_in(store)
    assert len(texts_in(store)) == 3
    for text in "efg":
        below.delete(texts_in(below)[0])  # another process
        below.put(make_entry(text), FINGERPRINT)
        store.put(make_entry(f"{text}{text}"), FINGERPRINT)
    assert len(texts_in(store)) == 3


def test_a_disk_makes_room_within_its_limit(tmp_path: Path) -> None:
    config = StoreConfig(tmp_path, memory_bytes=0, disk_bytes=60_000)
    store = open_store(config)
    for number in range(30):
        assert store.put(make_entry(str(number), tokens=40), FINGERPRINT) > 0
        assert sum(info.nbytes for info in store.entries()) <= 60_000
    assert same(store.get("29", FINGERPRINT).entry, make_entry("29", tokens=40))
    assert 3 <= len(texts_in(store)) < 30
    store.close()


# ---- against a dictionary


class Tiers(RuleBasedStateMachine):
    """All that may be done to a tiered store, beside a plain dictionary."""

    names = st.sampled_from(["a", "b", "c", "d", "e"])
    prints = st.sampled_from([FINGERPRINT, OTHER])
    documents = st.sampled_from([None, "one", "two"])

    def __init__(self) -> None:
        super().__init__()
        self.store = TieredStore(
            MemoryStore(3 * SIZE, policy="lru", admission=True),
            MemoryStore(1 << 30),
            device=MemoryStore(2 * SIZE, policy="pgdsf", admission=True),
        )
        self.other = TieredStore(MemoryStore(2 * SIZE), self.store.below)
        self.model: dict[tuple[str, Fingerprint], int] = {}
        self.held: dict[str, set[str]] = {}

    @rule(text=names, fingerprint=prints, tokens=st.integers(1, 4), document=documents)
    def put(self, text: str, fingerprint: Fingerprint, tokens: int, document: str | None) -> None:
        self.store.put(make_entry(text, tokens=tokens), fingerprint, Terms(document))
        self.model[text, fingerprint] = tokens
        self.held.setdefault(text, set()).update({document} if document else ())

    @rule(text=names, fingerprint=prints)
    def get(self, text: str, fingerprint: Fingerprint) -> None:
        lookup = self.store.get(text, fingerprint)
        if (text, fingerprint) in self.model:
            assert same(lookup.entry, make_entry(text, tokens=self.model[text, fingerprint]))
        else:
            known = any(other == text for other, _ in self.model)
            assert (lookup.entry, lookup.reason) == (None, "fingerprint" if known else "absent")

    @rule(text=names, by_another=st.booleans())
    def delete(self, text: str, by_another: bool) -> None:
        store = self.other if by_another else self.store
        gone = [key for key in self.model if key[0] == text]
        assert store.delete(text) == len(gone)
        for key in gone:
            del self.model[key]
        self.held.pop(text, None)
        self.store.changes(0)

    @rule(document=documents.filter(bool), texts=st.sets(names))
    def keep_only(self, document: str, texts: set[str]) -> None:
        gone = [
            text
            for text, documents in self.held.items()
            if document in documents and text not in texts
        ]
        for text in gone:
            self.held[text].discard(document)
        gone = [text for text in gone if not self.held[text]]
        assert self.store.keep_only(document, texts) == len(gone)
        for text in gone:
            del self.held[text]
            for key in [key for key in self.model if key[0] == text]:
                del self.model[key]

    @invariant()
    def agrees(self) -> None:
        assert set(self.store.texts()) == {text for text, _ in self.model}
        for tier in self.store.tiers:
            assert tier.nbytes == sum(info.nbytes for info in tier.entries()) <= tier.budget
        for text, fingerprint in self.model:
            assert self.store.contains(text, fingerprint)


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_lossy_codec_gives_this_process_what_it_gives_others(tmp_path: Path) -> None:
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
