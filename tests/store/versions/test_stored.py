"""Versions in a store: what comes back, what is refused, and what deletes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from disk_store import DiskStore
from memory_backend import MemoryBackend
from store_entries import FINGERPRINT, OTHER, make_entry, same, without_syncs  # noqa: F401

from ragkv.errors import StoreFullError
from ragkv.store import ChunkStore, MemoryStore, TieredStore
from ragkv.store.base import Terms
from ragkv.store.catalog import names
from ragkv.store.entry.format import encode
from ragkv.store.operate.copy import copy_store
from ragkv.store.operate.inspect import stats, verify
from ragkv.store.versions.stored import to_field
from ragkv.store.versions.version import Version

pytestmark = pytest.mark.usefixtures("without_syncs")
A, B, C = "the first", "lone \ud800\udc00 surrogates", "the third"


@pytest.fixture
def store() -> ChunkStore:
    made = ChunkStore(MemoryBackend())
    for text in (A, B, C):
        made.put(make_entry(text), FINGERPRINT)
    return made


def version(text: str = C, prefix: tuple[str, ...] = (A, B)) -> Version:
    entry = make_entry(text)
    tokens = len(entry)
    entry = replace(entry, keys=torch.rand_like(entry.keys), values=torch.rand_like(entry.values))
    ranks = np.random.default_rng(0).permutation(tokens)
    inter = np.linspace(0.1, 1 / 3, len(prefix))
    return Version(text, entry, FINGERPRINT, prefix, inter, 0.7, 0.6, ranks, 1e12)


def keys(store: ChunkStore, room: str) -> list[str]:
    return [key.name for key in store.backend.scan(f"{room}/")]


def test_what_was_put_comes_back(store: ChunkStore) -> None:
    put, own = version(), list(store.entries())
    assert store.put_version(put) > put.entry.nbytes
    (found,) = store.versions(C, FINGERPRINT)
    assert found.entry is None
    for name in ("text", "fingerprint", "prefix", "intra", "impact", "expires_at"):
        assert getattr(found, name) == getattr(put, name)
    assert found.inter.tolist() == put.inter.tolist()
    assert found.ranks.tolist() == put.ranks.tolist()
    assert same(store.read_version(found), put.entry)
    assert store.versions(C, OTHER) == store.versions(A, FINGERPRINT) == []
    # it is no entry: nobody who asks for entries sees it
    assert list(store.entries()) == own
    assert stats(store).entries == 3
    assert same(store.get(C, FINGERPRINT).entry, make_entry(C))
    assert store.get(C, put.stored_as).reason == "fingerprint"


def test_versions_of_several_contexts_stand_side_by_side(store: ChunkStore) -> None:
    all_of_c = [version(C, prefix) for prefix in ((A, B), (B, A), (A,))]
    for each in all_of_c:
        store.put_version(each)
    found = {each.prefix: each for each in store.versions(C, FINGERPRINT)}
    assert set(found) == {(A, B), (B, A), (A,)}
    for each in all_of_c:
        assert same(store.read_version(found[each.prefix]), each.entry)
    store.delete_version(all_of_c[0])
    assert {each.prefix for each in store.versions(C, FINGERPRINT)} == {(B, A), (A,)}


@pytest.mark.parametrize("gone", [A, B, C])
def test_deleting_any_of_its_chunks_deletes_its_bytes(store: ChunkStore, gone: str) -> None:
    put = version()
    store.put_version(put)
    store.put_version(version(B, (A,)))
    store.delete(gone)
    assert store.versions(C, FINGERPRINT) == []
    assert store.read_version(put) is None
    assert len(keys(store, "version")) == (gone == C)
    store.gc()
    assert len(keys(store, "version")) == (gone == C)
    assert len(keys(store, "behind")) == (gone == C)
    assert verify(store).problems == []


def test_forgetting_a_document_deletes_the_versions_behind_its_chunks(store: ChunkStore) -> None:
    store.retain(A, FINGERPRINT, Terms("handbook"))
    store.put_version(version())
    store.forget_document("handbook")
    assert keys(store, "version") == []


def test_behind_what_is_not_stored_none_is_kept(store: ChunkStore) -> None:
    assert store.put_version(version(C, (A, "unknown"))) == 0
    assert store.put_version(version("unknown", (A,))) == 0
    assert keys(store, "version") == []
    store.gc()
    assert keys(store, "behind") == []


def test_remains_of_an_interrupted_deletion_go_with_gc(store: ChunkStore) -> None:
    store.put_version(version())
    store.backend.delete(names.text_key(names.digest_of_text(A)))
    store.gc()
    assert keys(store, "version") == keys(store, "behind") == []


@pytest.mark.parametrize("at", ["header", "layers"])
def test_a_damaged_version_is_deleted(store: ChunkStore, at: str) -> None:
    put = version()
    store.put_version(put)
    (key,) = keys(store, "version")
    data = bytearray(store.backend.get(key))
    data[200 if at == "header" else -len(put.ranks) * 12 - 5] ^= 4
    store.backend.put(key, [bytes(data)])
    assert [problem.kind for problem in verify(store).problems] == ["damaged"]
    if at == "header":
        assert store.versions(C, FINGERPRINT) == []
    else:
        (found,) = store.versions(C, FINGERPRINT)
        assert store.read_version(found) is None
    assert keys(store, "version") == []


def test_a_version_in_anothers_place_is_not_used(store: ChunkStore) -> None:
    put = version()
    store.put_version(put)
    (key,) = keys(store, "version")
    data = store.backend.get(key)
    moved = names.version_key(names.digest_of_text(C), version(C, (A,)).stored_as.digest)
    entry = names.version_key(names.digest_of_text(C), "0" * 32)
    store.backend.put(moved, [data])
    own = names.entry_key(names.digest_of_text(C), FINGERPRINT.digest)
    store.backend.put(entry, [store.backend.get(own)])
    assert [each.prefix for each in store.versions(C, FINGERPRINT)] == [put.prefix]
    assert store.read_version(version(C, (A,))) is None


@pytest.mark.parametrize("old", ['"prefix"', '"ranks":[', '"intra":0.7', '"expires_at":1', "[{"])
def test_forged_fields_are_refused(store: ChunkStore, old: str) -> None:
    put = version()
    field = to_field(put)
    assert old in field
    key = names.version_key(names.digest_of_text(C), put.stored_as.digest)
    for new in ("[", "{", f"1{old}", old.replace("1", '"1"').replace("0.7", "[]")):
        if new == old:
            continue
        forged = encode(put.entry, put.stored_as, field.replace(old, new))
        store.put_version(put)
        store.backend.put(key, list(forged.parts()))
        assert [problem.kind for problem in verify(store).problems] == ["damaged"]
        assert store.read_version(put) is None
        assert store.versions(C, FINGERPRINT) == []


def test_a_version_is_not_taken_for_the_entry_nor_the_entry_for_a_version(
    store: ChunkStore,
) -> None:
    put, own = version(), names.entry_key(names.digest_of_text(C), FINGERPRINT.digest)
    store.backend.put(own, list(encode(put.entry, FINGERPRINT, to_field(put)).parts()))
    assert [problem.kind for problem in verify(store).problems] == ["damaged"]
    assert store.get(C, FINGERPRINT).reason == "format"
    key = names.version_key(names.digest_of_text(C), put.stored_as.digest)
    store.backend.put(key, list(encode(put.entry, put.stored_as).parts()))
    assert store.versions(C, FINGERPRINT) == []
    assert store.read_version(put) is None


def test_tiers_hand_versions_on_and_memory_alone_keeps_none(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "store", mapped=False)
    tiers = TieredStore(MemoryStore(1 << 20), disk)
    memory, put = MemoryStore(1 << 20), version(C, (A,))
    for each in (tiers, memory):
        for text in (A, C):
            each.put(make_entry(text), FINGERPRINT)
    assert memory.put_version(put) == 0
    assert memory.versions(C, FINGERPRINT) == []
    assert tiers.put_version(put) > 0
    assert same(tiers.read_version(tiers.versions(C, FINGERPRINT)[0]), put.entry)
    assert copy_store(disk, DiskStore(tmp_path / "copy", mapped=False)).entries == 2
    tiers.delete(A)
    assert tiers.versions(C, FINGERPRINT) == []


def test_a_full_place_keeps_what_it_has(tmp_path: Path) -> None:
    entry = make_entry(A)
    one = DiskStore(tmp_path / "large").put(entry, FINGERPRINT)
    store = DiskStore(tmp_path / "small", budget=6 * one)
    store.put(entry, FINGERPRINT)
    store.put(make_entry(C), FINGERPRINT)
    prefixes = [(A,) * count for count in range(1, 9)]
    assert sum(_fits(store, prefix) for prefix in prefixes) < len(prefixes)
    assert same(store.get(A, FINGERPRINT).entry, entry)
    for found in store.versions(C, FINGERPRINT):
        assert store.read_version(found) is not None
    assert verify(store).sound


def _fits(store: ChunkStore, prefix: tuple[str, ...]) -> bool:
    try:
        return store.put_version(version(C, prefix)) > 0
    except StoreFullError:
        return False
