"""The memory tier: its budget, its order, its cost, and how it stands over a disk."""

import random
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
import torch
from disk_store import DiskStore, tiered
from served import until
from store_entries import FINGERPRINT, file_of, make_entry, same, without_syncs  # noqa: F401
from threads import each_in_a_thread

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreFullError
from ragkv.store import ChunkStore, TieredStore
from ragkv.store.backends.backend import Blob
from ragkv.store.backends.memory import MemoryBackend
from ragkv.store.tiers.tier import MemoryTier, size_of

pytestmark = pytest.mark.usefixtures("without_syncs")


SIZE = size_of(make_entry("a"))


def test_threads_never_exceed_the_budget():
    tier = MemoryTier(20_000)
    seen: list[int] = []

    def fill(seed):
        draw = random.Random(seed)
        for number in range(150):
            entry = make_entry(f"chunk {number % 90}", tokens=draw.randint(1, 60))
            tier.put(entry, FINGERPRINT)
            seen.append(tier.nbytes)

    each_in_a_thread(fill, range(4))
    assert len(seen) == 600
    assert max(seen) <= tier.budget
    kept = [tier.get(text, FINGERPRINT) for text in tier.texts()]
    assert tier.nbytes == sum(size_of(each.entry) for each in kept if each is not None)
    assert tier.nbytes > tier.budget / 2


def test_what_was_used_least_and_not_for_longest_leaves_first():
    tier = MemoryTier(3 * SIZE)
    for text in ("a", "b", "c"):
        assert tier.put(make_entry(text), FINGERPRINT) == []
    tier.get("a", FINGERPRINT)
    (evicted,) = tier.put(make_entry("d"), FINGERPRINT) or ()
    assert evicted.entry.text == "b"
    assert sorted(tier.texts()) == ["a", "c", "d"]
    assert tier.get("b", FINGERPRINT) is None


def test_an_entry_larger_than_the_budget_is_not_kept():
    tier = MemoryTier(2 * SIZE)
    for text in "ab":
        tier.put(make_entry(text), FINGERPRINT)
    assert tier.put(make_entry("a", tokens=500), FINGERPRINT) is None
    assert tier.texts() == ["b"]


def test_a_view_does_not_hold_the_batch_it_was_cut_from():
    batch = torch.zeros(2, 100, 2, 3, 4)
    entry = make_entry("a")
    view = ChunkKV("a", entry.token_ids, entry.offsets, batch[:, 0], batch[:, 1])
    tier = MemoryTier(1 << 20)
    tier.put(view, FINGERPRINT)
    found = tier.get("a", FINGERPRINT)
    assert tier.nbytes == SIZE
    assert found is not None
    assert found.entry.keys.untyped_storage().nbytes() == found.entry.keys.nbytes


def test_a_hit_costs_microseconds(tmp_path):
    store = tiered(tmp_path, 1 << 30)
    text = "word " * 400
    store.put(make_entry(text, tokens=400), FINGERPRINT)
    costs = []
    for _ in range(200):
        start = time.perf_counter()
        store.get(text, FINGERPRINT)
        costs.append(time.perf_counter() - start)
    assert sorted(costs)[100] < 50e-6
    store.close()


def test_reading_fills_memory_with_bytes_of_its_own(tmp_path):
    DiskStore(tmp_path).put(make_entry("a"), FINGERPRINT)
    store = tiered(tmp_path)
    first = store.get("a", FINGERPRINT).entry
    path = file_of(store, "a")
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert same(first, make_entry("a"))
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))
    path.unlink()
    second = store.get("a", FINGERPRINT).entry
    assert same(second, make_entry("a"))
    assert first is not None
    assert second is not None
    assert first.keys.data_ptr() == second.keys.data_ptr()  # loaded once, not copied again
    store.tiers[0].delete("a")
    assert store.get("a", FINGERPRINT).reason == "unreadable"


def test_what_is_not_on_disk_is_not_in_memory(tmp_path):
    store = tiered(tmp_path, budget=10)
    with pytest.raises(StoreFullError):
        store.put(make_entry("a"), FINGERPRINT)
    assert store.get("a", FINGERPRINT).reason == "absent"
    assert store.tiers[0].nbytes == 0


class SlowBackend(MemoryBackend):
    """Waits until it may go on, once it has read an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on, self.reads = threading.Event(), threading.Event(), 0
        self.broken = False

    def get_many(self, keys: Iterable[str]) -> Iterator[Blob | None]:
        self.reads += 1
        found = list(super().get_many(keys))
        self.entered.set()
        assert self.go_on.wait(10)
        if self.broken:
            raise RuntimeError("broken")
        return iter(found)


def in_threads(store: TieredStore, slow: SlowBackend, count: int) -> list[object]:
    """Ask for "a" in several threads; let them load once all of them have asked."""
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(store.get("a", FINGERPRINT).entry)
        except RuntimeError as error:
            found.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    assert slow.entered.wait(10)
    (loading,) = store._loading.values()
    until(lambda: len(loading._condition._waiters) == count - 1)
    slow.go_on.set()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_an_entry_is_loaded_once_for_all_who_wait(budget):
    slow = SlowBackend()
    store = tiered(slow, budget)
    ChunkStore(slow).put(make_entry("a"), FINGERPRINT)
    found = in_threads(store, slow, 5)
    assert len(found) == 5
    assert all(same(entry, make_entry("a")) for entry in found)
    assert slow.reads == 1


def test_an_error_reaches_all_who_wait_and_is_forgotten():
    slow = SlowBackend()
    store, slow.broken = tiered(slow), True
    found = in_threads(store, slow, 3)
    assert [type(error) for error in found] == [RuntimeError] * 3
    slow.broken = False
    assert store.get("a", FINGERPRINT).reason == "absent"


def test_a_deletion_outruns_a_running_load():
    slow = SlowBackend()
    store = tiered(slow)
    ChunkStore(slow).put(make_entry("a"), FINGERPRINT)
    loader = threading.Thread(target=store.get, args=("a", FINGERPRINT), daemon=True)
    loader.start()
    assert slow.entered.wait(10)
    assert store.delete("a") == 1
    slow.go_on.set()
    loader.join()
    assert store.get("a", FINGERPRINT).reason == "absent"


def test_pinned_memory_is_counted_as_it_is_taken(monkeypatch):
    """In powers of two; and where there is none, ordinary memory does."""
    taken: list[torch.Tensor] = []

    def pinned(shape, dtype):
        if len(taken) == 2:
            return None
        taken.append(torch.empty(shape, dtype=dtype))
        return taken[-1]

    monkeypatch.setattr("ragkv.store.tiers.tier.pinned", pinned)
    entries = [make_entry(text, tokens=9) for text in "abc"]
    rounded = 1 << (entries[0].nbytes - 1).bit_length()
    kept = size_of(entries[0]) - entries[0].nbytes + rounded
    assert rounded > entries[0].nbytes
    tier = MemoryTier(2 * kept, pin=True)
    assert [len(tier.put(entry, FINGERPRINT) or ()) for entry in entries] == [0, 0, 1]
    assert tier.nbytes == 2 * kept
    assert tier.get("a", FINGERPRINT) is None
    _, second, third = (tier.get(text, FINGERPRINT) for text in "abc")
    assert second is not None
    assert third is not None
    assert same(second.entry, entries[1])
    assert same(third.entry, entries[2])
    assert second.entry.keys.data_ptr() == taken[1].data_ptr()


def test_a_device_without_room_keeps_nothing_and_fails_nobody(monkeypatch):
    store = tiered(MemoryBackend())
    (tier,), (first, second) = store.tiers, (make_entry(text) for text in "ab")
    store.put(first, FINGERPRINT)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("ragkv.store.tiers.tier._owned", full)
    assert store.put(second, FINGERPRINT)
    assert tier.texts() == ["a"]
    assert same(store.get("b", FINGERPRINT).entry, second)
    assert tier.put(first, FINGERPRINT) is None  # nor the old one, which it was to replace
    assert tier.nbytes == 0


def test_a_look_that_is_overtaken_empties_no_tier(monkeypatch):
    store = tiered(MemoryBackend())
    store.put(make_entry("a"), FINGERPRINT)
    looked, go_on = threading.Event(), threading.Event()
    changes = ChunkStore.changes

    def slow(store, since):
        found = changes(store, since)
        if threading.current_thread() is late:
            looked.set()
            go_on.wait(1)
        return found

    monkeypatch.setattr(ChunkStore, "changes", slow)
    late = threading.Thread(target=store.changes, args=(0,))
    late.start()
    assert looked.wait(10)
    store.put(make_entry("b"), FINGERPRINT)
    store.changes(0)
    go_on.set()
    late.join(10)
    assert sorted(store.tiers[0].texts()) == ["a", "b"]


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Events of a tier's copies: one has begun; they may go on."""
    begun, go_on = threading.Event(), threading.Event()

    def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        begun.set()
        assert go_on.wait(10)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr("ragkv.store.tiers.tier.pinned", pinned)
    return begun, go_on


def filled(store: TieredStore) -> None:
    """Wait until the tiers have what was copied."""
    assert store._copying is not None
    store._copying.shutdown()
    assert store._waiting == 0


def test_tiers_that_copy_are_filled_behind_the_request(copying):
    """And no more waits for that than a quarter of the budget."""
    begun, go_on = copying
    backend, entries = MemoryBackend(), [make_entry(text, tokens=300) for text in "abcdef"]
    for entry in entries:
        ChunkStore(backend).put(entry, FINGERPRINT)
    memory = MemoryTier(12 * entries[0].nbytes, pin=True)
    store = tiered(backend, memory)
    for entry in entries:
        assert same(store.get(entry.text, FINGERPRINT).entry, entry)
    assert begun.wait(10)
    assert store._waiting == 3 * entries[0].nbytes
    assert memory.nbytes == 0
    go_on.set()
    filled(store)
    assert sorted(memory.texts()) == ["a", "b", "c"]


def test_what_was_deleted_meanwhile_is_not_kept(copying):
    _, go_on = copying
    backend = MemoryBackend()
    for text in "abc":
        ChunkStore(backend).put(make_entry(text), FINGERPRINT)
    store = tiered(backend, MemoryTier(1 << 20, pin=True))
    for text in "abc":
        store.get(text, FINGERPRINT)
    deleting = threading.Thread(target=store.delete, args=("b",))
    deleting.start()
    go_on.set()
    deleting.join(10)
    filled(store)
    assert "b" not in store.tiers[0].texts()
    assert store.get("b", FINGERPRINT).entry is None
