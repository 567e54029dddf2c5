"""Stats, verify and copy, over the simplest backend."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from store_entries import FINGERPRINT, OTHER, make_entry, put_texts, same, without_syncs  # noqa: F401

from ragkv.errors import StoreError, StoreFullError
from ragkv.store.backends.memory import MemoryBackend, Place
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.names import digest_of_fingerprint, digest_of_text, entry_key, text_key
from ragkv.store.operate import copy_store, stats, verify
from ragkv.store.types import Terms

INT8 = replace(FINGERPRINT, codec="int8")


def key_of(text: str) -> str:
    return entry_key(digest_of_text(text), digest_of_fingerprint(FINGERPRINT))


@pytest.fixture
def store() -> Iterator[ChunkStore]:
    with closing(ChunkStore(MemoryBackend())) as opened:
        opened.put(make_entry("a"), FINGERPRINT, Terms("one"))
        opened.put(make_entry("a", tokens=8), INT8, Terms("two"))
        opened.put(make_entry("b"), FINGERPRINT, Terms(expires_at=time.time() + 1000))
        yield opened


def test_stats_count(store):
    found = stats(store)
    assert (found.texts, found.documents, found.entries, found.expired) == (2, 2, 3, 0)
    assert found.nbytes == sum(info.nbytes for info in store.entries())
    kinds = {kind.fingerprint: kind for kind in found.kinds}
    assert kinds[FINGERPRINT.digest][1:4] == ("float32", "raw", 2)
    assert kinds[INT8.digest][1:4] == ("float32", "int8", 1)
    store.put(make_entry("c"), FINGERPRINT, Terms(expires_at=time.time() - 1))
    assert stats(store).expired == 1


def test_a_whole_store_has_no_problems(store):
    found = verify(store)
    assert found.sound
    assert not found.problems
    assert found.values == len(list(store.backend.scan("")))
    store.delete("a")
    assert not verify(store).problems


def flipped(store: ChunkStore) -> None:
    data = bytearray(store.backend.get(key_of("b")))
    data[-1] ^= 1
    store.backend.put(key_of("b"), [data])


def cut(store: ChunkStore) -> None:
    store.backend.put(key_of("b"), [store.backend.get(key_of("b"))[:-5]])


def moved(store: ChunkStore) -> None:
    store.backend.put(key_of("b"), [store.backend.get(key_of("a"))])


def no_row(store: ChunkStore) -> None:
    store.backend.put(text_key(digest_of_text("b")), [b"{}"])


def no_log(store: ChunkStore) -> None:
    for key in list(store.backend.scan("log/")):
        if store.backend.get(key.name) == b"+b":
            store.backend.put(key.name, [b"+x"])


@pytest.mark.parametrize(
    ("harm", "kind", "where"),
    [
        (flipped, "damaged", key_of("b")),
        (cut, "damaged", key_of("b")),
        (moved, "foreign", key_of("b")),
        (no_row, "damaged", text_key(digest_of_text("b"))),
        (no_log, "damaged", text_key(digest_of_text("b"))),
    ],
)
def test_damage_is_found_and_healed(store, harm, kind, where):
    harm(store)
    found = verify(store)
    assert not found.sound
    assert (where, kind) in [(problem.key, problem.kind) for problem in found.problems]
    healed = verify(store, heal=True)
    assert healed.sound
    assert healed.healed == 1
    assert verify(store).sound
    assert not store.contains("b", FINGERPRINT)
    store.put(make_entry("b"), FINGERPRINT)
    store.gc()
    assert not verify(store).problems
    assert same(store.get("b", FINGERPRINT).entry, make_entry("b"))
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))
    assert set(store.changes(0)[1]) >= {"a", "b"}


def test_what_interrupted_writers_leave_is_orphaned(store):
    backend = store.backend
    backend.delete(text_key(digest_of_text("b")))
    backend.delete(key_of("a"))
    backend.delete(entry_key(digest_of_text("a"), digest_of_fingerprint(INT8)))
    found = verify(store, heal=True)
    assert found.sound
    assert found.counts == {"orphaned": 2}
    assert found.healed == 0
    store.gc()
    assert not verify(store).problems


def test_what_is_deleted_while_it_is_verified_is_no_damage():
    place = Place()
    other = ChunkStore(MemoryBackend(place))
    other.put(make_entry("a"), FINGERPRINT)

    class Slow(MemoryBackend):
        asked = 0

        def get(self, key):
            self.asked += key.startswith("log/")
            if self.asked == 2:  # between the text's row and its change
                other.delete("a")
            return super().get(key)

    assert verify(ChunkStore(Slow(place))).sound
    assert not other.contains("a", FINGERPRINT)


def test_other_versions_are_left_alone(store):
    names = [key_of("b").replace("-v2", "-v9"), "elsewhere/x", "log/x", "held/x"]
    for name in names:
        store.backend.put(name, [b"later"])
    found = verify(store, heal=True)
    assert found.sound
    assert sorted(p.key for p in found.problems if p.kind == "unknown") == sorted(names)
    assert store.backend.get(names[0]) == b"later"


def carried_texts(store: ChunkStore) -> dict[tuple[str, str], tuple[object, ...]]:
    return {
        (info.text, info.fingerprint): (info.nbytes, info.documents, info.expires_at)
        for info in store.entries()
    }


def test_a_copy_has_everything(store):
    store.retain("a", FINGERPRINT, Terms("parts", revision="7"))
    with closing(ChunkStore(MemoryBackend())) as other:
        done = copy_store(store, other)
        assert (done.entries, done.existing, done.damaged) == (3, 0, 0)
        assert done.nbytes == stats(store).nbytes
        assert carried_texts(other) == carried_texts(store)
        assert other.catalog.held_by(digest_of_text("a"))["parts"] == "7"
        state = dict(other.backend.place.values)
        again = copy_store(store, other)
        assert (again.entries, again.existing, again.nbytes) == (0, 3, 0)
        assert other.backend.place.values == state
        assert not verify(other).problems
        assert same(other.get("a", FINGERPRINT).entry, make_entry("a"))


def test_what_the_target_has_stays_and_documents_are_added(store):
    with closing(ChunkStore(MemoryBackend())) as other:
        put_texts(other, "ac", Terms("three"))
        assert copy_store(store, other).existing == 1
        assert other.documents("a") == ["one", "three", "two"]
        assert other.documents("c") == ["three"]


def test_damaged_and_foreign_entries_are_not_copied(store):
    flipped(store)
    put_texts(store, "cd")
    store.backend.put(key_of("c"), [store.backend.get(key_of("a"))])  # moved
    with closing(ChunkStore(MemoryBackend())) as other:
        done = copy_store(store, other)
        assert (done.entries, done.damaged) == (3, 2)
        assert verify(other).sound


def test_an_interrupted_copy_goes_on(store):
    class Full(MemoryBackend):
        def put(self, key, parts):
            if key == entry_key(digest_of_text("b"), digest_of_fingerprint(FINGERPRINT)):
                raise StoreFullError("no room")
            super().put(key, parts)

    place = Place()
    with closing(ChunkStore(Full(place))) as other, pytest.raises(StoreFullError):
        copy_store(store, other)
    with closing(ChunkStore(MemoryBackend(place))) as other:
        copy_store(store, other)
        assert carried_texts(other) == carried_texts(store)


def test_what_is_deleted_while_it_is_copied_is_left_out(store):
    class Deleting(MemoryBackend):
        def put(self, key, parts):
            super().put(key, parts)
            if key.startswith("kv/"):
                for text in ("a", "b"):
                    store.delete(text)

    with closing(ChunkStore(Deleting())) as other:
        done = copy_store(store, other)
        assert (done.entries, done.damaged) == (1, 0)


def test_a_copy_needs_a_writable_target(store):
    with (
        closing(ChunkStore(MemoryBackend(), read_only=True)) as other,
        pytest.raises(StoreError, match="read_only"),
    ):
        copy_store(store, other)
