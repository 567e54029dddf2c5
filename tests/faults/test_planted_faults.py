"""Planted faults: whatever happens to a store, an answer is right or a miss."""

import errno
import io
import json
import os
import pickle
import random
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from children import needs_children
from disk_store import DiskStore, tiered
from fresh import output_of
from store_entries import (  # noqa: F401
    FINGERPRINT,
    OTHER,
    file_of,
    files_of,
    make_entry,
    same,
    without_syncs,
)

from ragkv.errors import StoreError, StoreFullError
from ragkv.store import ChunkStore
from ragkv.store.backends import index as index_module
from ragkv.store.backends.index import Index
from ragkv.store.names import digest_of_text, entry_key
from ragkv.store.types import Terms

pytestmark = pytest.mark.usefixtures("without_syncs")


@pytest.fixture(params=[DiskStore, lambda path: tiered(path, 1)], ids=["mapped", "owned"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChunkStore]:
    """A store whose entries are mapped, or copied for a tier that has no room for them."""
    with closing(request.param(tmp_path)) as made:
        yield made


def flip(path: Path, position: int, mask: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def assert_heals(store: ChunkStore, text: str) -> None:
    """After the miss, the next precompute finds nothing and puts the entry back."""
    assert not store.contains(text, FINGERPRINT)
    assert store.get(text, FINGERPRINT).reason == "absent"
    assert text not in list(store.texts())
    store.put(make_entry(text), FINGERPRINT)
    assert same(store.get(text, FINGERPRINT).entry, make_entry(text))
    assert len(files_of(store)) == len(list(store.texts()))


def test_flipped_bytes(store):
    store.put(make_entry("a"), FINGERPRINT)
    for position in range(0, file_of(store, "a").stat().st_size, 37):
        flip(file_of(store, "a"), position)
        lookup = store.get("a", FINGERPRINT)
        assert lookup.entry is None
        assert lookup.reason in {"checksum", "format", "unreadable"}
        assert_heals(store, "a")


def test_cut_and_lengthened_files(store):
    store.put(make_entry("a"), FINGERPRINT)
    size = file_of(store, "a").stat().st_size
    for length in [0, 1, 7, 8, 9, *range(10, size, 61), size - 1, size + 1, size + 5000]:
        os.truncate(file_of(store, "a"), length)
        assert not store.contains("a", FINGERPRINT)
        assert store.get("a", FINGERPRINT).reason == "unreadable"
        assert_heals(store, "a")


FOREIGN: dict[str, Callable[[Path, bytes, bytes], object]] = {
    "fingerprint": lambda path, other_model, _: path.write_bytes(other_model),
    "tokens": lambda path, _, other_text: path.write_bytes(other_text),
    "format": lambda path, *_: path.write_bytes(
        path.read_bytes().replace(b'"ragkv":"2"', b'"ragkv":"3"')
    ),
    "unreadable": lambda path, *_: path.unlink(),
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_foreign_files_under_a_key(store, reason):
    data = []
    for text, fingerprint in (("a", OTHER), ("b", FINGERPRINT)):
        store.put(make_entry(text), fingerprint)
        data.append(file_of(store, text).read_bytes())
        store.delete(text)
    store.put(make_entry("a"), FINGERPRINT)
    FOREIGN[reason](file_of(store, "a"), *data)
    assert store.get("a", FINGERPRINT).reason == reason
    assert_heals(store, "a")


def test_one_bad_entry_leaves_the_texts_others(store):
    store.put(make_entry("a"), FINGERPRINT)
    bad = file_of(store, "a")
    store.put(make_entry("a"), OTHER)
    flip(bad, -1)
    assert store.get("a", FINGERPRINT).reason == "checksum"
    assert store.get("a", FINGERPRINT).reason == "fingerprint"
    assert same(store.get("a", OTHER).entry, make_entry("a"))
    assert store.changes(0)[1] == ["a"]


def test_a_bad_file_that_was_replaced_meanwhile_is_spared(tmp_path, monkeypatch):
    reader, writer = DiskStore(tmp_path), DiskStore(tmp_path)
    writer.put(make_entry("a"), FINGERPRINT)
    flip(file_of(writer, "a"), -1)
    drop = reader.refuse

    def late(*arguments):
        writer.put(make_entry("a"), FINGERPRINT)
        drop(*arguments)

    monkeypatch.setattr(reader, "refuse", late)
    assert reader.get("a", FINGERPRINT).reason == "checksum"
    assert same(reader.get("a", FINGERPRINT).entry, make_entry("a"))


def test_a_file_that_cannot_be_opened_now_is_kept(store, monkeypatch):
    store.put(make_entry("a"), FINGERPRINT)

    def fail(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        assert store.get("a", FINGERPRINT).reason == "unreadable"
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def use_everything(store: DiskStore) -> None:
    """Call every method; errors are allowed, unpickling is not."""
    for call in (
        lambda: store.get("a", FINGERPRINT),
        lambda: store.contains("a", FINGERPRINT),
        lambda: store.changes(0),
        lambda: list(store.texts()),
        lambda: store.changes(0).removed,
        lambda: list(store.entries()),
        lambda: store.put(make_entry("b"), FINGERPRINT, Terms("d")),
        lambda: store.delete("a"),
        lambda: store.put(make_entry("a"), FINGERPRINT, Terms("d")),
        lambda: store.forget_document("d"),
        store.gc,
        lambda: store.put(make_entry("a"), FINGERPRINT),
        lambda: store.put(make_entry("b"), FINGERPRINT),
    ):
        call()


ROWS = ["!bytes", "store", "text/%", "kv/%", "log/%", "held/%", "document/%"]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", ["value", "key", "json", "text", "number", "ours", "away"])
def test_planted_rows_are_not_believed(tmp_path, row, kind):
    mark, victim = tmp_path / "mark", tmp_path / "victim"
    victim.touch()
    bomb = pickle.dumps(Bomb(mark))
    with closing(DiskStore(tmp_path / "store")) as store:
        store.put(make_entry("a"), FINGERPRINT, Terms("d"))
    folder = store.folder / "index"
    change = {
        "value": ("value = ?", [bomb]),
        "key": ("key = ?", [bomb]),
        "json": ("value = ?", [b'{"change": [], "fingerprints": {}, "bytes": "x"}']),
        "ours": ("value = ?", [b'={"text": "b", "change": -1, "expires_at": {}}']),
        "away": ("value = ?", [b">0123456789abcdef 5"]),
        "text": ("value = ?", [str(victim)]),
        "number": ("value = 5", []),
    }[kind]
    with closing(sqlite3.connect(folder / "cache.db", isolation_level=None)) as planted:
        statement = f"UPDATE Cache SET {change[0]} WHERE key LIKE '{row}'"  # noqa: S608
        assert planted.execute(statement, change[1]).rowcount == 1
    with closing(DiskStore(tmp_path / "other")) as store:  # the method calls are in order
        use_everything(store)
    try:
        with closing(DiskStore(tmp_path / "store")) as store:
            use_everything(store)
            assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))
            assert same(store.get("b", FINGERPRINT).entry, make_entry("b"))
    except StoreError as refused:
        assert row == "store"
        assert re.search("the index is of|first row is damaged", str(refused))  # noqa: PT017
    assert not mark.exists()
    assert victim.exists()


def test_the_bomb_goes_off_where_pickles_are_read(tmp_path):
    """The tests above would see it."""
    assert pickle.loads(pickle.dumps(Bomb(tmp_path / "mark"))) is None
    assert (tmp_path / "mark").exists()


def test_pickled_files_under_a_key(store, tmp_path):
    store.put(make_entry("a"), FINGERPRINT)
    mark = tmp_path / "mark"
    for planted in (pickle.dumps(Bomb(mark)), _saved_by_torch({"kv": Bomb(mark)})):
        file_of(store, "a").write_bytes(planted)
        assert store.get("a", FINGERPRINT).reason == "unreadable"
        assert not mark.exists()
        assert_heals(store, "a")


def _saved_by_torch(value: object) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def fail_with(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def half_then_full(file: int, views: Sequence[memoryview]) -> int:
    data = b"".join(views)
    if len(data) < 50:
        fail_with(errno.ENOSPC)()
    return os.pwrite(file, data[: len(data) // 2], 0)


def database_full(*_: object) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


@pytest.mark.parametrize("before", [False, True], ids=["new", "again"])
@pytest.mark.parametrize(
    ("target", "fault", "error"),
    [
        ("ragkv.store.backends.files._write", half_then_full, StoreFullError),
        ("ragkv.store.backends.files._write", fail_with(errno.EDQUOT), StoreFullError),
        ("ragkv.store.backends.files._write", fail_with(errno.EIO), StoreError),
        ("os.fsync", fail_with(errno.ENOSPC), StoreFullError),
        ("pathlib.Path.replace", fail_with(errno.ENOSPC), StoreFullError),
        ("pathlib.Path.replace", fail_with(errno.EACCES), StoreError),
        ("ragkv.store.backends.files.sync_folder", fail_with(errno.ENOSPC), StoreFullError),
        ("ragkv.store.backends.index.IndexRows.set", database_full, StoreFullError),
        ("pathlib.Path.replace", KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch, target, fault, error, before):
    if fault is KeyboardInterrupt:
        fault = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    with closing(DiskStore(tmp_path)) as store:
        store.put(make_entry("other"), FINGERPRINT)
        key = entry_key(digest_of_text("a"), FINGERPRINT.digest)
        folder = store.folder / "kv" / blake3(key.encode()).hexdigest()[:2]
        folder.mkdir(exist_ok=True)
        if before:
            store.put(make_entry("a"), FINGERPRINT)
        state = store.changes(0)[1], files_of(store)
        with monkeypatch.context() as patch:
            patch.setattr(target, fault)
            with pytest.raises(error) as raised:
                store.put(make_entry("a"), FINGERPRINT)
        assert type(raised.value) is error
        assert (store.changes(0)[1], files_of(store)) == state
        assert store.contains("a", FINGERPRINT) == before
        assert same(store.get("other", FINGERPRINT).entry, make_entry("other"))
        store.put(make_entry("a"), FINGERPRINT)
        assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))


@pytest.mark.skipif(os.name == "nt", reason="POSIX limits")
def test_a_real_limit_on_file_size(tmp_path):
    import resource

    with closing(DiskStore(tmp_path)) as store:
        store.put(make_entry("small"), FINGERPRINT)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(StoreFullError):
                store.put(make_entry("large", tokens=4000), FINGERPRINT)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(files_of(store)) == 1
        store.put(make_entry("large", tokens=4000), FINGERPRINT)


@contextmanager
def held_for_writing(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    yield
    database.execute("ROLLBACK")


@contextmanager
def held_for_reading(database: sqlite3.Connection) -> Iterator[None]:
    reading = database.execute("SELECT key FROM Cache")
    assert reading.fetchone()
    yield
    reading.close()


@pytest.mark.parametrize("held", [held_for_writing, held_for_reading])
def test_a_database_that_is_never_free(held, tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "LOCK_TIMEOUT_S", 0.1)
    with closing(DiskStore(tmp_path)) as store:
        store.put(make_entry("a"), FINGERPRINT)
        database = store.folder / "index" / "cache.db"
        with closing(sqlite3.connect(database, isolation_level=None)) as other, held(other):
            with pytest.raises(StoreError, match="locked by another process"):
                store.put(make_entry("b"), FINGERPRINT)
            assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))
        assert len(files_of(store)) == 1
        assert store.changes(0)[:2] == (1, ["a"])


def test_opening_waits_for_a_writer(tmp_path):
    with closing(Index(tmp_path / "index")) as index, ThreadPoolExecutor(1) as pool:

        def write():
            with index.transaction() as rows:
                rows.set("key", b"value")

        database = tmp_path / "index" / "cache.db"
        with closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            writing = pool.submit(write)
            with pytest.raises(TimeoutError):
                writing.result(timeout=0.2)
            other.execute("ROLLBACK")
        writing.result()
        assert index.get("key") == b"value"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into Linux' /proc")
def test_threads_leave_no_open_files(tmp_path):
    with closing(DiskStore(tmp_path, mapped=False)) as store:
        with ThreadPoolExecutor(4) as pool:
            for text in pool.map(str, range(12)):
                pool.submit(store.put, make_entry(text), FINGERPRINT).result()
                assert store.get(text, FINGERPRINT).entry is not None
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert len([link for link in links if link.is_relative_to(tmp_path)]) <= 1


def test_random_damage_to_the_index(tmp_path):
    with closing(DiskStore(tmp_path)) as store:
        for text in ("a", "b"):
            store.put(make_entry(text), FINGERPRINT)
    database = store.folder / "index" / "cache.db"
    good, draw = database.read_bytes(), random.Random(0)
    for _ in range(60):
        database.write_bytes(good)
        for _ in range(draw.randint(1, 20)):
            flip(database, draw.randrange(len(good)), draw.randrange(1, 256))
        try:
            with closing(DiskStore(tmp_path, read_only=True)) as damaged:
                for text in ("a", "b", "c"):
                    entry = damaged.get(text, FINGERPRINT).entry
                    assert entry is None or same(entry, make_entry(text))
                damaged.contains("a", FINGERPRINT)
                damaged.changes(0)
        except StoreError as error:
            assert re.search("precompute again|the index is of", str(error))  # noqa: PT017


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    script = Path(__file__).parents[1] / "support" / "store_processes.py"
    return json.loads(output_of(str(script), tmp_path_factory.mktemp("store")))


@needs_children
def test_processes_that_race_die_and_may_not_write(processes):
    assert processes["race"]["texts"] == 62  # each came as a change of its own
    assert processes["kill"]["acknowledged"] > processes["kill"]["runs"]
    # a crash at each step of a write: 8 were not acknowledged, 2 had been committed
    assert processes["points"] == {"lost": 8, "kept": 2, "temporary": 3}
    assert processes["journal"]["hot"] > 0  # a crash in the middle of a commit
    assert processes["read_only"]["status"] == 0
