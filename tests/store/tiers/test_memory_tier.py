"""The memory tier: its budget, its order, its cost, and how it stands over a disk."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
from disk_store import DiskStore
from store_entries import FINGERPRINT, file_of, make_entry, same, without_syncs  # noqa: F401
from threads import each_in_a_thread

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError, StoreFullError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store import Found, MemoryStore, TieredStore

pytestmark = pytest.mark.usefixtures("without_syncs")


def size_of(entry: ChunkKV) -> int:
    return MemoryStore(1 << 40).put(entry, FINGERPRINT)


def test_the_budget_is_never_exceeded() -> None:
    draw = random.Random(0)
    store = MemoryStore(20_000)
    for number in range(300):
        store.put(make_entry(f"chunk {number % 90}", tokens=draw.randint(1, 60)), FINGERPRINT)
        assert store.nbytes <= store.budget
        held = [store.get(text, FINGERPRINT).entry for text in store.texts()]
        assert store.nbytes == sum(size_of(entry) for entry in held if entry is not None)
    assert store.nbytes > store.budget / 2


def test_threads_share_the_budget() -> None:
    store = MemoryStore(20_000)
    seen: list[int] = []

    def fill(name: int) -> None:
        for number in range(100):
            store.put(make_entry(f"chunk {name} {number}", tokens=number % 40 + 1), FINGERPRINT)
            seen.append(store.nbytes)

    each_in_a_thread(fill, range(4))
    assert len(seen) == 400
    assert max(seen) <= store.budget


def test_what_was_not_used_for_longest_leaves_first() -> None:
    store = MemoryStore(3 * size_of(make_entry("a")))
    for text in ("a", "b", "c"):
        store.put(make_entry(text), FINGERPRINT)
    store.get("a", FINGERPRINT)
    store.put(make_entry("d"), FINGERPRINT)
    assert list(store.texts()) == ["a", "c", "d"]
    assert store.get("b", FINGERPRINT).reason == "absent"
    assert store.changes(0)[:2] == (4, ["a", "c", "d"])


def test_an_entry_larger_than_the_budget_is_not_kept() -> None:
    small, large = make_entry("a"), make_entry("a", tokens=500)
    store = MemoryStore(2 * size_of(small))
    store.put(small, FINGERPRINT)
    store.put(make_entry("b"), FINGERPRINT)
    assert store.put(large, FINGERPRINT) == 0
    assert list(store.texts()) == ["b"]
    assert store.changes(2)[:2] == (2, [])


def test_a_view_does_not_hold_the_batch_it_was_cut_from() -> None:
    batch = torch.zeros(2, 100, 2, 3, 4)
    entry = make_entry("a")
    view = ChunkKV("a", entry.token_ids, entry.offsets, batch[:, 0], batch[:, 1])
    store = MemoryStore(1 << 20)
    assert store.put(view, FINGERPRINT) == size_of(entry)
    found = store.get("a", FINGERPRINT).entry
    assert found is not None
    assert found.keys.untyped_storage().nbytes() == found.keys.nbytes


def test_a_hit_costs_microseconds(tmp_path: Path) -> None:
    store = TieredStore(MemoryStore(1 << 30), DiskStore(tmp_path, mapped=False))
    text = "word " * 400
    store.put(make_entry(text, tokens=400), FINGERPRINT)
    costs = []
    for _ in range(200):
        start = time.perf_counter()
        store.get(text, FINGERPRINT)
        costs.append(time.perf_counter() - start)
    assert sorted(costs)[100] < 50e-6
    store.close()


def test_reading_fills_memory_with_bytes_of_its_own(tmp_path: Path) -> None:
    DiskStore(tmp_path).put(make_entry("a"), FINGERPRINT)
    disk = DiskStore(tmp_path, mapped=False)
    store = TieredStore(MemoryStore(1 << 20), disk)
    first = store.get("a", FINGERPRINT).entry
    path = file_of(disk, "a")
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert same(first, make_entry("a"))
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))
    path.unlink()
    second = store.get("a", FINGERPRINT).entry
    assert same(second, make_entry("a"))
    assert first is not None
    assert second is not None
    assert first.keys.data_ptr() == second.keys.data_ptr()  # loaded once, not copied again
    store.memory.delete("a")
    assert store.get("a", FINGERPRINT).reason == "unreadable"


def test_what_is_not_on_disk_is_not_in_memory(tmp_path: Path) -> None:
    store = TieredStore(MemoryStore(1 << 20), DiskStore(tmp_path, budget=10, mapped=False))
    with pytest.raises(StoreFullError):
        store.put(make_entry("a"), FINGERPRINT)
    assert store.get("a", FINGERPRINT).reason == "absent"
    assert store.memory.nbytes == 0


class SlowStore(MemoryStore):
    """Waits in ``get`` until it may go on."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.entered, self.go_on, self.gets = threading.Event(), threading.Event(), 0

    def get(self, text: str, fingerprint: Fingerprint) -> Found:
        self.gets += 1
        lookup = super().get(text, fingerprint)
        self.entered.set()
        assert self.go_on.wait(10)
        if text == "broken":
            raise StoreError(text)
        return lookup


def in_threads(store: TieredStore, text: str, slow: SlowStore, count: int) -> list[object]:
    """Ask for a text in several threads; let them load once all of them have asked."""
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(store.get(text, FINGERPRINT).entry)
        except StoreError as error:
            found.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    assert slow.entered.wait(10)
    time.sleep(0.05)
    slow.go_on.set()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_an_entry_is_loaded_once_for_all_who_wait(budget: int) -> None:
    slow = SlowStore()
    slow.put(make_entry("a"), FINGERPRINT)
    found = in_threads(TieredStore(MemoryStore(budget), slow), "a", slow, 5)
    assert len(found) == 5
    assert all(same(entry, make_entry("a")) for entry in found)
    assert slow.gets == 1


def test_an_error_reaches_all_who_wait_and_is_forgotten() -> None:
    slow = SlowStore()
    store = TieredStore(MemoryStore(1 << 20), slow)
    found = in_threads(store, "broken", slow, 3)
    assert [type(error) for error in found] == [StoreError] * 3
    assert store.get("a", FINGERPRINT).reason == "absent"


def test_a_deletion_outruns_a_running_load() -> None:
    slow = SlowStore()
    slow.put(make_entry("a"), FINGERPRINT)
    store = TieredStore(MemoryStore(1 << 20), slow)
    loader = threading.Thread(target=store.get, args=("a", FINGERPRINT), daemon=True)
    loader.start()
    assert slow.entered.wait(10)
    assert store.delete("a") == 1
    slow.go_on.set()
    loader.join()
    assert store.get("a", FINGERPRINT).reason == "absent"


def test_pinned_memory_is_counted_as_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In powers of two; and where there is none, ordinary memory does."""
    taken: list[torch.Tensor] = []

    def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        if len(taken) == 2:
            return None
        taken.append(torch.empty(shape, dtype=dtype))
        return taken[-1]

    monkeypatch.setattr("ragkv.store.tiers.memory.pinned", pinned)
    entries = [make_entry(text, tokens=9) for text in "abc"]
    rounded = 1 << (entries[0].nbytes - 1).bit_length()
    kept = size_of(entries[0]) - entries[0].nbytes + rounded
    assert rounded > entries[0].nbytes
    store = MemoryStore(2 * kept, pinned=True)
    assert [store.put(entry, FINGERPRINT) for entry in entries] == [kept] * 3
    assert store.nbytes == 2 * kept
    found = [store.get(text, FINGERPRINT).entry for text in "abc"]
    assert [found[0], same(found[1], entries[1]), same(found[2], entries[2])] == [None, True, True]
    assert found[1] is not None
    assert found[1].keys.data_ptr() == taken[1].data_ptr()


def test_a_device_without_room_keeps_nothing_and_fails_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, (first, second) = MemoryStore(1 << 20), (make_entry(text) for text in "ab")
    store.put(first, FINGERPRINT)

    def full(*_: object) -> ChunkKV:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("ragkv.store.tiers.memory._owned", full)
    tiers = TieredStore(MemoryStore(1 << 20), store)
    assert tiers.put(second, FINGERPRINT) == 0
    found = tiers.get("a", FINGERPRINT).entry
    assert found is not None
    assert same(found, first)
    assert tiers.memory.nbytes == 0
    assert store.put(first, FINGERPRINT) == 0  # nor the old one, which it was to replace
    assert store.nbytes == 0


def test_a_look_that_is_overtaken_empties_no_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    below = MemoryStore(1 << 20)
    store = TieredStore(MemoryStore(1 << 20), below)
    store.put(make_entry("a"), FINGERPRINT)
    looked, go_on = threading.Event(), threading.Event()
    changes = below.changes

    def slow(since: int) -> tuple[int, list[str]]:
        found = changes(since)
        if threading.current_thread() is late:
            looked.set()
            go_on.wait(1)
        return found

    monkeypatch.setattr(below, "changes", slow)
    late = threading.Thread(target=store.changes, args=(0,))
    late.start()
    assert looked.wait(10)
    store.put(make_entry("b"), FINGERPRINT)
    store.changes(0)
    go_on.set()
    late.join(10)
    assert sorted(store.memory.texts()) == ["a", "b"]


def test_tiers_that_copy_are_filled_behind_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more waits for that than a quarter of the budget."""
    go_on, copied = threading.Event(), threading.Event()

    def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        copied.set()
        assert go_on.wait(10)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr("ragkv.store.tiers.memory.pinned", pinned)
    below, entries = MemoryStore(1 << 24), [make_entry(text, tokens=300) for text in "abcdef"]
    for entry in entries:
        below.put(entry, FINGERPRINT)
    memory = MemoryStore(12 * entries[0].nbytes, pinned=True)
    store = TieredStore(memory, below)
    for entry in entries:
        assert same(store.get(entry.text, FINGERPRINT).entry, entry)
    assert copied.wait(10)
    assert store._waiting == 3 * entries[0].nbytes
    assert memory.nbytes == 0
    go_on.set()
    assert store._copying is not None
    store._copying.shutdown()
    assert sorted(memory.texts()) == ["a", "b", "c"]
    assert store._waiting == 0


def test_what_was_deleted_meanwhile_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert go_on.wait(10)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr("ragkv.store.tiers.memory.pinned", pinned)
    below = MemoryStore(1 << 20)
    for text in "abc":
        below.put(make_entry(text), FINGERPRINT)
    store = TieredStore(MemoryStore(1 << 20, pinned=True), below)
    for text in "abc":
        store.get(text, FINGERPRINT)
    deleting = threading.Thread(target=store.delete, args=("b",))
    deleting.start()
    go_on.set()
    deleting.join(10)
    assert store._copying is not None
    store._copying.shutdown()
    assert "b" not in store.memory.texts()
    assert store.get("b", FINGERPRINT).entry is None
    assert store._waiting == 0
