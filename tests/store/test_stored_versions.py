"""Versions in a store: what comes back, what is refused, and what deletes them."""

from dataclasses import replace

import numpy as np
import pytest
from disk_store import DiskStore, tiered
from store_entries import FINGERPRINT, OTHER, make_entry, put_texts, same, without_syncs  # noqa: F401

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreFullError
from ragkv.store import ChunkStore, names, open_store
from ragkv.store.backends.memory import MemoryBackend
from ragkv.store.entry.format import encode
from ragkv.store.operate import copy_store, stats, verify
from ragkv.store.stored_versions import StoredVersions, to_field
from ragkv.store.types import Terms
from ragkv.store.version import Version

pytestmark = pytest.mark.usefixtures("without_syncs")
A, B, C = "the first", "lone \ud800\udc00 surrogates", "the third"


@pytest.fixture
def store() -> ChunkStore:
    made = ChunkStore(MemoryBackend())
    put_texts(made, (A, B, C))
    return made


def version(text: str = C, prefix: tuple[str, ...] = (A, B)) -> Version:
    ranks = np.random.default_rng(0).permutation(len(make_entry(text)))
    inter = np.linspace(0.1, 1 / 3, len(prefix))
    path = f"{len(prefix)}"
    return Version(text, FINGERPRINT, prefix, inter, 0.7, 0.6, ranks, path, 7, 1e12)


def rows_of(one: Version) -> ChunkKV:
    """Its rows, not the entry's."""
    return replace(make_entry(" ".join((*one.prefix, one.text))), text=one.text)


def put(store: ChunkStore, one: Version) -> int:
    return StoredVersions(store).put(one, rows_of(one))


def keys(store: ChunkStore, room: str) -> list[str]:
    return [key.name for key in store.backend.scan(f"{room}/")]


def test_what_was_put_comes_back(store):
    one, own = version(), list(store.entries())
    assert put(store, one) > rows_of(one).nbytes
    (found,) = StoredVersions(store).of(C, FINGERPRINT)
    assert found.place is None
    for name in ("text", "fingerprint", "prefix", "intra", "impact", "path", "first", "expires_at"):
        assert getattr(found, name) == getattr(one, name)
    assert found.inter.tolist() == one.inter.tolist()
    assert found.ranks.tolist() == one.ranks.tolist()
    assert same(StoredVersions(store).read(found), rows_of(one))
    assert StoredVersions(store).of(C, OTHER) == StoredVersions(store).of(A, FINGERPRINT) == []
    # it is no entry: nobody who asks for entries sees it
    assert list(store.entries()) == own
    assert stats(store).entries == 3
    assert same(store.get(C, FINGERPRINT).entry, make_entry(C))
    assert store.get(C, one.stored_as).reason == "fingerprint"


def test_versions_of_several_contexts_stand_side_by_side(store):
    all_of_c = [version(C, prefix) for prefix in ((A, B), (B, A), (A,))]
    for each in all_of_c:
        put(store, each)
    found = {each.prefix: each for each in StoredVersions(store).of(C, FINGERPRINT)}
    assert set(found) == {(A, B), (B, A), (A,)}
    for each in all_of_c:
        assert same(StoredVersions(store).read(found[each.prefix]), rows_of(each))
    StoredVersions(store).delete(all_of_c[0])
    assert {each.prefix for each in StoredVersions(store).of(C, FINGERPRINT)} == {(B, A), (A,)}


@pytest.mark.parametrize("gone", [A, B, C])
def test_deleting_any_of_its_chunks_deletes_its_bytes(store, gone):
    one = version()
    put(store, one)
    put(store, version(B, (A,)))
    store.delete(gone)
    assert StoredVersions(store).of(C, FINGERPRINT) == []
    assert StoredVersions(store).read(one) is None
    assert len(keys(store, "version")) == (gone == C)
    store.gc()
    assert len(keys(store, "version")) == (gone == C)
    assert len(keys(store, "behind")) == (gone == C)
    assert verify(store).problems == []


def test_forgetting_a_document_deletes_the_versions_behind_its_chunks(store):
    store.retain(A, FINGERPRINT, Terms("handbook"))
    put(store, version())
    store.forget_document("handbook")
    assert keys(store, "version") == []


def test_behind_what_is_not_stored_none_is_kept(store):
    assert put(store, version(C, (A, "unknown"))) == 0
    assert put(store, version("unknown", (A,))) == 0
    assert keys(store, "version") == []
    store.gc()
    assert keys(store, "behind") == []


def test_remains_of_an_interrupted_deletion_go_with_gc(store):
    put(store, version())
    store.backend.delete(names.text_key(names.digest_of_text(A)))
    store.gc()
    assert keys(store, "version") == keys(store, "behind") == []


@pytest.mark.parametrize("at", ["header", "layers"])
def test_a_damaged_version_is_deleted(store, at):
    one = version()
    put(store, one)
    (key,) = keys(store, "version")
    data = bytearray(store.backend.get(key))
    data[200 if at == "header" else -len(one.ranks) * 12 - 5] ^= 4
    store.backend.put(key, [bytes(data)])
    assert [problem.kind for problem in verify(store).problems] == ["damaged"]
    if at == "header":
        assert StoredVersions(store).of(C, FINGERPRINT) == []
    else:
        (found,) = StoredVersions(store).of(C, FINGERPRINT)
        assert StoredVersions(store).read(found) is None
    assert keys(store, "version") == []


def test_a_version_in_anothers_place_is_not_used(store):
    one = version()
    put(store, one)
    (key,) = keys(store, "version")
    data = store.backend.get(key)
    moved = names.version_key(names.digest_of_text(C), version(C, (A,)).stored_as.digest)
    entry = names.version_key(names.digest_of_text(C), "0" * 32)
    store.backend.put(moved, [data])
    own = names.entry_key(names.digest_of_text(C), FINGERPRINT.digest)
    store.backend.put(entry, [store.backend.get(own)])
    assert [each.prefix for each in StoredVersions(store).of(C, FINGERPRINT)] == [one.prefix]
    assert StoredVersions(store).read(version(C, (A,))) is None


@pytest.mark.parametrize(
    "old", ['"prefix"', '"ranks":[', '"intra":0.7', '"expires_at":1', '"path":"', '"first":7', "[{"]
)
def test_forged_fields_are_refused(store, old):
    one = version()
    field = to_field(one)
    assert old in field
    key = names.version_key(names.digest_of_text(C), one.stored_as.digest)
    for new in (
        "[",
        "{",
        f"1{old}",
        old.replace("1", '"1"').replace("0.7", "[]"),
        old.replace(":7", ":-7"),
    ):
        if new == old:
            continue
        forged = encode(rows_of(one), one.stored_as, field.replace(old, new))
        put(store, one)
        store.backend.put(key, forged)
        assert [problem.kind for problem in verify(store).problems] == ["damaged"]
        assert StoredVersions(store).read(one) is None
        assert StoredVersions(store).of(C, FINGERPRINT) == []


def test_a_version_is_not_taken_for_the_entry_nor_the_entry_for_a_version(store):
    one, own = version(), names.entry_key(names.digest_of_text(C), FINGERPRINT.digest)
    store.backend.put(own, encode(rows_of(one), FINGERPRINT, to_field(one)))
    assert [problem.kind for problem in verify(store).problems] == ["damaged"]
    assert store.get(C, FINGERPRINT).reason == "format"
    key = names.version_key(names.digest_of_text(C), one.stored_as.digest)
    store.backend.put(key, encode(rows_of(one), one.stored_as))
    assert StoredVersions(store).of(C, FINGERPRINT) == []
    assert StoredVersions(store).read(one) is None


def test_tiers_hand_versions_on_and_memory_alone_keeps_none(tmp_path):
    tiers = tiered(tmp_path / "store")
    memory, one = open_store(":memory:"), version(C, (A,))
    for each in (tiers, memory):
        put_texts(each, (A, C))
    assert put(memory, one) == 0
    assert StoredVersions(memory).of(C, FINGERPRINT) == []
    assert put(tiers, one) > 0
    assert same(
        StoredVersions(tiers).read(StoredVersions(tiers).of(C, FINGERPRINT)[0]), rows_of(one)
    )
    assert copy_store(tiers, DiskStore(tmp_path / "copy", mapped=False)).entries == 2
    tiers.delete(A)
    assert StoredVersions(tiers).of(C, FINGERPRINT) == []


def test_a_full_place_keeps_what_it_has(tmp_path):
    entry = make_entry(A)
    one = DiskStore(tmp_path / "large").put(entry, FINGERPRINT)
    store = DiskStore(tmp_path / "small", budget=6 * one)
    store.put(entry, FINGERPRINT)
    store.put(make_entry(C), FINGERPRINT)
    prefixes = [(A,) * count for count in range(1, 9)]
    assert sum(_fits(store, prefix) for prefix in prefixes) < len(prefixes)
    assert same(store.get(A, FINGERPRINT).entry, entry)
    for found in StoredVersions(store).of(C, FINGERPRINT):
        assert StoredVersions(store).read(found) is not None
    assert verify(store).sound


def _fits(store: ChunkStore, prefix: tuple[str, ...]) -> bool:
    try:
        return put(store, version(C, prefix)) > 0
    except StoreFullError:
        return False
