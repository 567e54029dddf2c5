"""Keys that somebody damaged, in every backend: no reader fails, and healing removes them."""

import re
import sqlite3
import time
from bisect import insort
from collections.abc import Callable

import numpy as np
import pytest
from disk_store import DiskStore
from store_entries import FINGERPRINT, make_entry, same, without_syncs  # noqa: F401

from ragkv.store import ChunkStore
from ragkv.store.backends.backend import Backend
from ragkv.store.backends.disk import DiskBackend
from ragkv.store.backends.memory import MemoryBackend
from ragkv.store.backends.redis import RedisBackend
from ragkv.store.backends.s3 import S3Backend
from ragkv.store.operate import Findings, copy_store, stats, verify
from ragkv.store.stored_versions import StoredVersions
from ragkv.store.types import Terms
from ragkv.store.version import Version

pytestmark = pytest.mark.usefixtures("without_syncs")

ROOMS = ("behind", "document", "held", "kv", "log", "text", "version")
TEXTS = ("a", "b", "c")
DAMAGES: dict[str, Callable[[str], str]] = {
    "control character": lambda key: f"{key[:-20]}\x19{key[-19:]}",
    "no UTF-8": lambda key: f"{key[:-20]}\xe9{key[-19:]}",
    "first character": lambda key: f"+{key[1:]}",
    "dot": lambda key: re.sub("/.", "/.", key, count=1),
}


def rooms_of(store: ChunkStore) -> list[str]:
    """Remote stores keep no versions."""
    return [room for room in ROOMS if not store.remote or room not in ("behind", "version")]


def fill(store: ChunkStore) -> None:
    for text in TEXTS:
        terms = Terms(f"document {text}", expires_at=time.time() + 1000 if text == "b" else None)
        store.put(make_entry(text), FINGERPRINT, terms)
    ranks = np.arange(len(make_entry("c")))
    version = Version("c", FINGERPRINT, ("a",), np.ones(1), 0.7, 0.6, ranks, "path", 1)
    StoredVersions(store).put(version, make_entry("c"))


def rename(backend: Backend, key: str, name: str) -> None:
    """Give a value another name, a byte a character."""
    raw = name.encode("latin-1")
    match backend:
        case MemoryBackend(place=place):
            place.values[name] = place.values.pop(key)
            place.keys.remove(key)
            insort(place.keys, name)
        case DiskBackend():
            with sqlite3.connect(backend.folder / "index" / "cache.db") as base:
                base.execute("UPDATE Cache SET key = CAST(? AS TEXT) WHERE key = ?", (raw, key))
            base.close()
        case RedisBackend():
            values = backend._values.encode()
            backend._client.rename(values + key.encode(), values + raw)
            backend._client.zrem(backend._keys, key)
            backend._client.zadd(backend._keys, {raw: 0})
        case S3Backend():
            backend._obstore.put(backend._store, name, bytes(backend.get(key) or b""))
            backend.delete(key)


@pytest.fixture(params=DAMAGES)
def store(request: pytest.FixtureRequest, opened: Callable[[], Backend]) -> ChunkStore:
    """A store of which a key of every kind is damaged."""
    writer = ChunkStore(opened())
    if request.param == "control character" and isinstance(writer.backend, S3Backend):
        pytest.skip("obstore writes no such name, and refuses to list one")
    fill(writer)
    for room in rooms_of(writer):
        (key, _), *_ = writer.backend.scan(f"{room}/")
        rename(writer.backend, key, DAMAGES[request.param](key))
    return ChunkStore(opened())


def assert_mended(store: ChunkStore) -> None:
    fill(store)
    store.gc()
    assert verify(store).sound
    assert sorted(store.texts()) == sorted(store.changes(0).added) == list(TEXTS)
    for text in TEXTS:
        assert same(store.get(text, FINGERPRINT).entry, make_entry(text))
        assert store.documents(text) == [f"document {text}"]
    assert len(StoredVersions(store).of("c", FINGERPRINT)) == (not store.remote)


def damaged(found: Findings) -> int:
    return sum(problem.detail == "not a key" for problem in found.problems)


def test_readers_pass_damaged_keys_over_and_healing_removes_them(store):
    for text in TEXTS:
        found = store.get(text, FINGERPRINT)
        assert found.entry is None or same(found.entry, make_entry(text))
        store.contains(text, FINGERPRINT)
        store.expiry(text)
        assert len(store.fingerprints(text)) <= 1
        assert set(store.documents(text)) <= {f"document {text}"}
        for version in StoredVersions(store).of(text, FINGERPRINT):
            StoredVersions(store).read(version)
    assert 1 <= len(list(store.entries())) == stats(store).entries < len(TEXTS)
    assert set(store.texts()) | set(store.changes(0).added) <= set(TEXTS)
    assert copy_store(store, ChunkStore(MemoryBackend())).entries == stats(store).entries

    assert damaged(verify(store)) == len(rooms_of(store))
    assert not verify(store).sound
    healed = verify(store, heal=True)
    assert healed.sound
    assert healed.healed >= damaged(healed) == len(rooms_of(store))
    assert verify(store).sound
    assert damaged(verify(store)) == 0
    assert_mended(store)


def test_deletions_pass_damaged_keys_over(store):
    store.gc()
    store.delete("a")
    store.keep_only("document b", ["b"])
    store.forget_document("document c")
    assert set(store.texts()) <= {"b"}
    assert damaged(verify(store, heal=True)) == len(rooms_of(store))
    assert_mended(store)


@pytest.mark.parametrize("where", ["table", "index", "both"])
@pytest.mark.parametrize("to", ["no key", "no UTF-8", "another key"])
@pytest.mark.parametrize("room", ROOMS)
def test_a_flipped_bit_in_a_folders_index_is_healed(tmp_path, where, to, room):
    """SQLite has each key twice, in its table and in its index, and reads either."""
    before = DiskStore(tmp_path)
    fill(before)
    (key, _), *_ = before.backend.scan(f"{room}/")
    before.close()
    file = before.folder / "index" / "cache.db"
    data = bytearray(file.read_bytes())
    places = [found.start() for found in re.finditer(re.escape(key.encode()), data)]
    for place in {"table": places[:1], "index": places[1:], "both": places}[where]:
        at = place + len(key) - 20
        bits = {"no UTF-8": 0x80, "another key": 0x01, "no key": 0x20 if data[at] < 0x40 else 0x40}
        data[at] ^= bits[to]
    file.write_bytes(data)
    store = DiskStore(tmp_path)
    assert {info.text for info in store.entries()} <= set(TEXTS)
    assert damaged(verify(store)) == 1 or to == "another key"
    assert verify(store, heal=True).sound
    assert damaged(verify(store)) == 0
    assert_mended(store)
