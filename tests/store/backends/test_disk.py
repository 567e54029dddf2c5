"""The disk store: files, namespaces, several openers, budgets, read-only service."""

import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from disk_store import DiskStore
from store_entries import (  # noqa: F401
    FINGERPRINT,
    OTHER,
    file_of,
    files_of,
    make_entry,
    put_texts,
    same,
    without_syncs,
)

from ragkv.config import StoreConfig
from ragkv.errors import StoreError, StoreFullError
from ragkv.store import open_store
from ragkv.store.backends import disk, files, folder_name
from ragkv.store.backends.backend import length_of
from ragkv.store.backends.disk import DiskBackend
from ragkv.store.backends.index import Index
from ragkv.store.entry.format import encode
from ragkv.store.names import digest_of_text, entry_key
from ragkv.store.types import Terms

pytestmark = pytest.mark.usefixtures("without_syncs")

NAMESPACES = [
    "default",
    "",
    "../x",
    "..",
    ".",
    "/etc",
    "a/b",
    "a\\b",
    "a-b",
    "A-B",
    "a b",
    "mit Ümläuten",
    "資料",
    "😀",
    "\ud83d",
    "nul\0byte",
    "CON",
    "x" * 5000,
    "x" * 5001,
]


ENTRY_KEY = entry_key(digest_of_text("a"), FINGERPRINT.digest)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with closing(DiskStore(tmp_path / "store")) as made:
        yield made


def snapshot(folder: Path) -> dict[Path, tuple[int, int, int]]:
    paths = [folder, *folder.rglob("*")]
    return {p: (p.stat().st_mode, p.stat().st_size, p.stat().st_mtime_ns) for p in paths}


def test_outlives_the_process_that_wrote_it(store):
    store.put(make_entry("a"), FINGERPRINT)
    change = store.changes(0)[0]
    store.close()
    with closing(DiskStore(store.folder.parent)) as again:
        assert same(again.get("a", FINGERPRINT).entry, make_entry("a"))
        assert again.get("a", OTHER).reason == "fingerprint"
        assert again.changes(0)[:2] == (change, ["a"])
        assert again.put(make_entry("b"), FINGERPRINT) > 0
        assert again.changes(change)[1] == ["b"]


def test_openers_learn_from_each_other(store):
    with closing(DiskStore(store.folder.parent)) as other:
        assert other.changes(0)[:2] == (0, [])
        store.put(make_entry("a"), FINGERPRINT)
        seen, texts, _ = other.changes(0)
        assert texts == ["a"]
        assert same(other.get("a", FINGERPRINT).entry, make_entry("a"))
        other.put(make_entry("b"), FINGERPRINT)
        assert store.changes(seen)[1] == ["b"]
        other.delete("a")
        assert not store.contains("a", FINGERPRINT)
        assert store.get("a", FINGERPRINT).reason == "absent"


def test_files_lie_where_the_format_says_and_are_private(store):
    size = store.put(make_entry("a"), FINGERPRINT)
    (path,) = files_of(store)
    name = blake3(ENTRY_KEY.encode()).hexdigest(length=16)
    assert path.parent == store.folder / "kv" / name[:2]
    assert re.fullmatch(f"{name}-[0-9a-f]{{16}}[.]safetensors", path.name)
    assert path.stat().st_size == size
    for path in [store.folder.parent, *store.folder.parent.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_names_on_disk_stay_what_they_are():
    # a change here loses the users' stores: then it needs a new version
    assert folder_name("a/b") == "a-b-0da3cfa5f8b7fae9def4d324da969d3a"
    text = digest_of_text("a")
    assert text == "17762fddd969a453925d65717ac3eea21320b66b54342fde15128d6caf21215f"
    assert entry_key(text, "f" * 32) == f"kv/{text}/{'f' * 32}-v2"


def test_namespaces_are_kept_apart(tmp_path):
    root = tmp_path / "store"
    assert len({folder_name(namespace).lower() for namespace in NAMESPACES}) == len(NAMESPACES)
    stores = {namespace: DiskStore(root, namespace) for namespace in NAMESPACES}
    for number, namespace in enumerate(NAMESPACES):
        assert stores[namespace].get("a", FINGERPRINT).reason == "absent"
        assert stores[namespace].changes(0)[:2] == (0, [])
        stores[namespace].put(make_entry("a", tokens=number + 1), FINGERPRINT)
    for number, namespace in enumerate(NAMESPACES):
        entry = stores[namespace].get("a", FINGERPRINT).entry
        assert same(entry, make_entry("a", tokens=number + 1))
    assert stores["../x"].delete("a") == 1
    assert stores["a/b"].contains("a", FINGERPRINT)
    for opened in stores.values():
        assert opened.folder.parent == root
        opened.close()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_moved_namespace_is_refused(store):
    store.put(make_entry("a"), FINGERPRINT)
    store.close()
    store.folder.rename(store.folder.with_name(folder_name("other")))
    with pytest.raises(StoreError, match='"namespace": "default"'):
        DiskStore(store.folder.parent, "other")
    with pytest.raises(StoreError, match='"namespace": "default"'):
        DiskStore(store.folder.parent, "other", read_only=True)


def test_an_unknown_index_is_refused_by_name(store):
    store.put(make_entry("a"), FINGERPRINT)
    store.backend.put("store", [b'{"format": 3, "namespace": "default"}'])
    with pytest.raises(StoreError, match='"format": 3'):
        DiskStore(store.folder.parent)
    with pytest.raises(StoreError, match='"format": 3'):
        store.put(make_entry("b"), FINGERPRINT)


@pytest.mark.parametrize(
    "content", [b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_broken_index_is_an_error_with_its_mend(store, content):
    store.put(make_entry("a"), FINGERPRINT)
    store.close()
    (store.folder / "index" / "cache.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"remove the folder .* and precompute again"):
        DiskStore(store.folder.parent)


def test_an_index_that_breaks_while_in_use_gives_misses(store):
    store.put(make_entry("a"), FINGERPRINT)
    change = store.changes(0)[0]
    (store.folder / "index" / "cache.db").write_bytes(b"not a database" * 2000)
    assert store.get("a", FINGERPRINT).reason == "unreadable"
    assert not store.contains("a", FINGERPRINT)
    with pytest.raises(StoreError):  # that nothing changed is not known
        store.changes(change)
    with pytest.raises(StoreError):
        store.put(make_entry("b"), FINGERPRINT)
    with pytest.raises(StoreError):
        store.delete("a")


def test_an_emptied_folder_starts_anew(store):
    put_texts(store, "ab")
    shutil.rmtree(store.folder)
    with closing(DiskStore(store.folder.parent)) as again:
        assert again.changes(2)[:2] == (0, [])
        again.put(make_entry("c"), FINGERPRINT)
        assert again.changes(2)[:2] == (1, ["c"])


def test_an_open_store_follows_its_folder_when_it_is_made_again(store):
    store.put(make_entry("a"), FINGERPRINT)
    assert store.get("a", FINGERPRINT).entry is not None
    shutil.rmtree(store.folder)
    assert store.get("a", FINGERPRINT).reason == "absent"
    assert store.changes(1)[:2] == (0, [])
    assert store.changes(1).removed == ["a"]
    with closing(DiskStore(store.folder.parent)) as again:
        again.put(make_entry("b"), FINGERPRINT)
        assert same(store.get("b", FINGERPRINT).entry, make_entry("b"))
        store.put(make_entry("c"), FINGERPRINT)
        assert store.contains("c", FINGERPRINT)
        assert sorted(again.texts()) == ["b", "c"]
    shutil.rmtree(store.folder)
    store.put(make_entry("d"), FINGERPRINT)
    assert list(store.texts()) == ["d"]


def test_the_disk_budget_holds(tmp_path):
    size = DiskStore(tmp_path / "other").put(make_entry("a"), FINGERPRINT)
    with closing(DiskStore(tmp_path / "store", budget=2 * size)) as store:
        store.put(make_entry("a"), FINGERPRINT)
        store.put(make_entry("b"), FINGERPRINT)
        before = snapshot(store.folder / "kv")
        with pytest.raises(StoreFullError, match="raise disk_bytes"):
            store.put(make_entry("c"), FINGERPRINT)
        assert snapshot(store.folder / "kv") == before
        assert store.get("c", FINGERPRINT).reason == "absent"
        store.put(make_entry("a"), FINGERPRINT)  # again: takes no more room
        store.delete("b")
        store.put(make_entry("c"), FINGERPRINT)
        assert sorted(store.texts()) == ["a", "c"]


def test_the_disk_budget_holds_between_openers(tmp_path, monkeypatch):
    size = DiskStore(tmp_path / "other").put(make_entry("a"), FINGERPRINT)
    first, second = (DiskStore(tmp_path / "store", budget=size) for _ in range(2))
    write = files.write_temporary

    def late(*arguments):
        monkeypatch.setattr(files, "write_temporary", write)
        second.put(make_entry("b"), FINGERPRINT)  # after the look before writing
        return write(*arguments)

    monkeypatch.setattr(files, "write_temporary", late)
    with pytest.raises(StoreFullError):
        first.put(make_entry("a"), FINGERPRINT)
    assert list(first.texts()) == ["b"]
    assert len(files_of(first)) == 1


def test_room_is_made_for_the_bytes_that_are_stored(tmp_path):
    fingerprint = replace(FINGERPRINT, codec="int4")
    entries = [make_entry(text, layers=4, tokens=400) for text in "abcd"]
    nbytes = length_of(encode(entries[0], fingerprint))
    limit = int(2.5 * nbytes)
    assert limit < entries[0].nbytes
    config = StoreConfig(tmp_path, memory_bytes=0, disk_bytes=limit, codec="int4")
    for entry in entries:
        with closing(open_store(config)) as store:  # one that has measured nothing yet
            store.put(entry, fingerprint)
            assert len(list(store.texts())) == min(entries.index(entry) + 1, 2)
            too_large = make_entry("e", layers=4, tokens=1200)
            with pytest.raises(StoreFullError):
                store.put(too_large, fingerprint)
            assert store.contains(entry.text, fingerprint)


def test_opening_sweeps_what_crashed_writers_left(store):
    store.put(make_entry("a"), FINGERPRINT)
    folder = file_of(store, "a").parent
    left = f"{folder.name}{30 * '0'}-{16 * '0'}.safetensors"
    orphan, fresh, old = (folder / name for name in (left, "tmp-1-fresh", "tmp-1-old"))
    for path in (orphan, fresh, old):
        path.write_bytes(b"left")
    os.utime(old, (time.time() - 3700,) * 2)
    with closing(DiskStore(store.folder.parent, read_only=True)):
        assert orphan.exists()
        assert old.exists()
    with closing(DiskStore(store.folder.parent)) as again:
        assert not orphan.exists()
        assert not old.exists()
        assert fresh.exists()
        assert same(again.get("a", FINGERPRINT).entry, make_entry("a"))


def test_opening_looks_through_changed_folders_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_SETTLES_NS", 0)

    def opened():
        looked = []
        with monkeypatch.context() as patch:
            listed = disk._listed
            patch.setattr(disk, "_listed", lambda path: looked.append(path.name) or listed(path))
            DiskStore(tmp_path).close()
        return sorted(looked)

    with closing(DiskStore(tmp_path)) as store:
        put_texts(store, "abc", tokens=500)
        folders = sorted({path.parent.name for path in files_of(store)})
        orphan = store.folder / "kv" / folders[0] / f"{folders[0]}{30 * '0'}-{16 * '0'}.safetensors"
        database = store.folder / "index" / "cache.db"
    assert opened() == sorted(["kv", *folders])
    assert opened() == ["kv"]
    orphan.touch()
    assert opened() == sorted(["kv", orphan.parent.name])
    assert not orphan.exists()
    assert opened() == sorted(["kv", orphan.parent.name])  # the removal has changed it
    assert opened() == ["kv"]
    for damaged in (b"=no JSON", b"[1]", b""):
        with closing(sqlite3.connect(database, isolation_level=None)) as rows:
            rows.execute("UPDATE Cache SET value = ? WHERE key = '!clean'", [damaged])
        assert opened() == sorted(["kv", *folders])


def test_the_sweep_spares_a_file_that_is_just_being_entered(store, monkeypatch):
    store.put(make_entry("a"), FINGERPRINT)
    named = DiskBackend._named

    def too_early(backend):
        monkeypatch.setattr(DiskBackend, "_named", named)
        return set()

    monkeypatch.setattr(DiskBackend, "_named", too_early)
    with closing(DiskStore(store.folder.parent)) as again:
        assert same(again.get("a", FINGERPRINT).entry, make_entry("a"))


def test_a_store_that_only_reads_writes_nothing(store):
    store.put(make_entry("a"), FINGERPRINT)
    store.put(make_entry("torn"), FINGERPRINT)
    path = file_of(store, "torn")
    path.write_bytes(path.read_bytes()[:-1])
    store.close()
    before = snapshot(store.folder.parent)
    with closing(DiskStore(store.folder.parent, read_only=True)) as served:
        assert same(served.get("a", FINGERPRINT).entry, make_entry("a"))
        assert served.get("torn", FINGERPRINT).reason == "unreadable"
        assert served.changes(0)[:2] == (2, ["a", "torn"])
        assert sorted(served.texts()) == ["a", "torn"]
        for refused in (
            lambda: served.put(make_entry("b"), FINGERPRINT),
            lambda: served.delete("a"),
            lambda: served.retain("a", FINGERPRINT, Terms()),
            lambda: served.forget_document("d"),
            served.gc,
            lambda: served.backend.put("key", [b""]),
            lambda: served.backend.put_if_absent("key", [b""]),
            lambda: served.backend.delete("key"),
        ):
            with pytest.raises(StoreError, match="was opened read"):
                refused()
    assert snapshot(store.folder.parent) == before


def test_a_store_that_only_reads_sees_what_others_write(store):
    with closing(DiskStore(store.folder.parent, read_only=True)) as served:
        assert served.get("a", FINGERPRINT).reason == "absent"
        assert served.changes(0)[:2] == (0, [])
        store.put(make_entry("a"), FINGERPRINT)
        assert served.changes(0)[:2] == (1, ["a"])
        assert same(served.get("a", FINGERPRINT).entry, make_entry("a"))


def test_there_is_nothing_to_read_where_no_store_is(tmp_path):
    with pytest.raises(StoreError, match="there is no store"):
        DiskStore(tmp_path / "nowhere", read_only=True)


@pytest.mark.parametrize("most_parts", [1, 3, 512])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_file_is_whole_whatever_one_call_writes(tmp_path, monkeypatch, most_parts, step):
    parts = [b"", b"ab", b"", bytearray(range(20)), memoryview(b"x"), b"end", b""]

    def write(file, views):
        return os.write(file, b"".join(views)[:step])

    monkeypatch.setattr(files, "_MOST_PARTS", most_parts)
    monkeypatch.setattr(files, "_write", write)
    assert files.write_temporary(tmp_path, iter(parts)).read_bytes() == b"".join(parts)


@pytest.mark.skipif(not hasattr(os, "writev"), reason="POSIX")
def test_a_file_is_written_in_one_call(store, monkeypatch):
    calls = []
    write = os.writev
    store.put(make_entry("the first"), FINGERPRINT)  # beside it the reserve is written
    monkeypatch.setattr(os, "writev", lambda *args: calls.append(args) or write(*args))
    entry = make_entry("x", tokens=500)
    store.put(entry, FINGERPRINT)
    assert len(calls) == 1  # then the page cache has it in larger pages
    assert same(store.get("x", FINGERPRINT).entry, entry)


def test_an_unusable_place_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for place in ("file", "file/below"):
        with pytest.raises(StoreError):
            DiskStore(tmp_path / place)


def test_variables_in_a_path(tmp_path, monkeypatch):
    """They are not expanded."""
    monkeypatch.setenv("RAGKV_TEST", "elsewhere")
    with closing(DiskStore(tmp_path / "$RAGKV_TEST ?#%20")) as store:
        store.put(make_entry("a"), FINGERPRINT)
        assert store.folder.is_relative_to(tmp_path / "$RAGKV_TEST ?#%20")
        assert store.contains("a", FINGERPRINT)


def test_a_closed_store_is_closed(store):
    store.put(make_entry("a"), FINGERPRINT)
    store.close()
    assert store.get("a", FINGERPRINT).reason == "unreadable"
    with pytest.raises(StoreError, match="closed"):
        store.put(make_entry("a"), FINGERPRINT)


def test_the_index_is_set_up_as_it_should_be(store):
    store.put(make_entry("x" * 100_000), FINGERPRINT)
    with closing(sqlite3.connect(store.folder / "index" / "cache.db")) as index:
        rows = index.execute("SELECT typeof(key), typeof(value) FROM Cache").fetchall()
        assert index.execute("PRAGMA auto_vacuum").fetchall() == [(1,)]  # deletions free space
    assert set(rows) == {("text", "blob")}
    assert {p.name for p in (store.folder / "index").iterdir()} <= {"cache.db", "cache.db-journal"}


LOCK = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"


def test_a_second_store_in_the_process_leaves_the_firsts_lock(store, monkeypatch):
    store.put(make_entry("a"), FINGERPRINT)
    database = store.folder / "index" / "cache.db"
    with closing(Index(database.parent)) as second, store.backend._index.transaction():
        monkeypatch.setattr("ragkv.store.backends.index.LOCK_TIMEOUT_S", 0)
        with pytest.raises(StoreError, match="locked"), second.transaction():
            pass
        other = subprocess.run(
            [sys.executable, "-c", LOCK, database], capture_output=True, text=True, check=False
        )
    assert "database is locked" in other.stderr


def test_open_store(tmp_path, monkeypatch):
    monkeypatch.setattr("ragkv.model.folders.user_cache_path", lambda name: tmp_path / name)
    for config, folder in [
        (None, tmp_path / "ragkv" / "store"),
        (str(tmp_path / "text"), tmp_path / "text"),
        (tmp_path / "path", tmp_path / "path"),
        (StoreConfig(tmp_path / "config", memory_bytes=0), tmp_path / "config"),
    ]:
        with closing(open_store(config, "name")) as store:
            assert store.backend.folder == folder / folder_name("name")
            assert store.mapped == (store.tiers[0].budget == 0)
    config = replace(StoreConfig(tmp_path / "config"), memory_bytes=5, disk_bytes=7, read_only=True)
    with closing(open_store(config)) as store:
        assert (store.tiers[0].budget, store.backend.budget, store.read_only) == (5, 7, True)


def test_memory_stores_are_namespaces_of_their_own():
    first, second = open_store(":memory:", "same"), open_store(":memory:", "same")
    first.put(make_entry("a"), FINGERPRINT)
    assert second.get("a", FINGERPRINT).reason == "absent"
