"""What takes several processes: a script, ``store_processes.py FOLDER``.

Writers race, writers die, and one process may not write.
"""

import json
import os
import random
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from unittest import mock

import children
from children import Child, Say
from disk_store import DiskStore
from store_entries import FINGERPRINT, files_of, leave_out_syncs, make_entry, same

from ragkv.config import StoreConfig
from ragkv.errors import StoreError
from ragkv.store import open_store
from ragkv.store.backends import files
from ragkv.store.backends.disk import DiskBackend

RUNS, WRITERS, ROUNDS = 12, 3, 20
RACED = "a", "b"


def check(folder: Path, acknowledged: set[str]) -> None:
    """Demand all that was acknowledged, and nothing that is torn."""
    store = DiskStore(folder)
    for text in acknowledged:
        assert same(store.get(text, FINGERPRINT).entry, make_entry(text, tokens=50)), text
    for text in store.texts():
        assert same(store.get(text, FINGERPRINT).entry, make_entry(text, tokens=50)), text
    entries = [path for path in files_of(store) if path.suffix == ".safetensors"]
    assert len(entries) == len(list(store.texts()))
    with sqlite3.connect(store.folder / "index" / "cache.db") as rows:
        ((size,),) = rows.execute("SELECT value FROM Cache WHERE key = '!bytes'").fetchall()
    assert int(size) == sum(path.stat().st_size for path in entries)
    store.close()


def put_endlessly(say: Say, folder: Path, run: int) -> None:
    store = DiskStore(folder)
    for number in range(10_000):
        text = f"chunk {run} {number % 7}"  # new ones, and the same ones again
        store.put(make_entry(text, tokens=50), FINGERPRINT)
        say(text)


def kill(folder: Path) -> dict[str, int]:
    """Kill writers at random moments."""
    draw, acknowledged = random.Random(0), set[str]()
    for run in range(RUNS):
        child = Child(put_endlessly, folder, run)
        assert child.kill(draw, 40)
        acknowledged |= set(child.said)
        check(folder, acknowledged)
    return {"runs": RUNS, "acknowledged": len(acknowledged)}


def put_get_delete(_: Say, folder: Path) -> None:
    store = DiskStore(folder)
    for number in range(ROUNDS):
        text = RACED[number % 2]
        store.put(make_entry(text, tokens=50), FINGERPRINT)
        found = store.get(text, FINGERPRINT)
        assert found.reason in {"", "absent", "unreadable"}, found.reason
        assert found.entry is None or same(found.entry, make_entry(text, tokens=50))
        if number % 10 == 9:
            store.delete(text)
        store.put(make_entry(text, tokens=50), FINGERPRINT)
        store.put(make_entry(f"{os.getpid()} {number}", tokens=50), FINGERPRINT)


def race(folder: Path) -> dict[str, int]:
    """Let processes write, read and delete the same chunks at once."""
    children = [Child(put_get_delete, folder) for _ in range(WRITERS)]
    assert [child.end() for child in children] == [0] * WRITERS
    check(folder, set(RACED))
    newest, found, _ = DiskStore(folder).changes(0)
    assert newest >= len(found)
    return {"texts": len(found)}


def die(*_: object, **__: object) -> None:
    os._exit(9)


def half_a_write(file: int, views: Sequence[memoryview]) -> int:
    data = b"".join(views)
    written = os.pwrite(file, data[: len(data) // 2], 0)
    os._exit(9 if written else 8)


def after(function: Callable[..., object]) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        function(*args, **kwargs)
        os._exit(9)

    return call


STEPS = {
    "half written": mock.patch.object(files, "_write", half_a_write),
    "not synced": mock.patch.object(os, "fsync", die),
    "announced": mock.patch.object(DiskBackend, "put_if_absent", after(DiskBackend.put_if_absent)),
    "text row begun": mock.patch.object(DiskBackend, "put", die),
    "text row written": mock.patch.object(DiskBackend, "put", after(DiskBackend.put)),
    "not renamed": mock.patch.object(Path, "replace", die),
    "after renaming": mock.patch.object(Path, "replace", after(Path.replace)),
    "before the commit": mock.patch.object(files, "sync_folder", after(files.sync_folder)),
    "after the commit": mock.patch.object(Path, "unlink", die),
    "before the last look": mock.patch.object(DiskBackend, "size", die),
}


def put_until(_: Say, folder: Path, step: str) -> None:
    with STEPS[step]:
        DiskStore(folder).put(make_entry(step, tokens=50), FINGERPRINT)


def points(folder: Path) -> dict[str, int]:
    """End a writer at each step of a write."""
    acknowledged = {"first"}
    store = DiskStore(folder)
    store.put(make_entry("first", tokens=50), FINGERPRINT)
    (store.folder / "kv").mkdir(exist_ok=True)
    lost = 0
    for step in STEPS:
        # folders are made and synced beforehand, so that the patched calls are the file's
        for number in range(256):
            files.make_private_folder(store.folder / "kv" / f"{number:02x}")
        assert Child(put_until, folder, step).end() == 9, step
        check(folder, acknowledged)
        lost += not store.contains(step, FINGERPRINT)
        store.put(make_entry(step, tokens=50), FINGERPRINT)
        acknowledged.add(step)
        check(folder, acknowledged)
    left = [path for path in files_of(store) if path.name.startswith("tmp-")]
    for path in left:
        os.utime(path, (0, 0))
    check(folder, acknowledged)
    assert files_of(store)
    assert not any(path.exists() for path in left)
    return {"lost": lost, "kept": len(STEPS) - lost, "temporary": len(left)}


def begin_to_change(_: Say, database: Path) -> None:
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE Cache SET value = zeroblob(20000)")
    os._exit(9)


def journal(folder: Path) -> dict[str, int]:
    """End a writer that has begun to change the database itself."""
    store = DiskStore(folder)
    acknowledged = {f"chunk {number}" for number in range(5)}
    for text in acknowledged:
        store.put(make_entry(text, tokens=50), FINGERPRINT)
    database = store.folder / "index" / "cache.db"
    assert Child(begin_to_change, database).end() == 9
    hot = database.with_name("cache.db-journal").stat().st_size
    assert hot > 0
    assert store.contains("chunk 0", FINGERPRINT)
    check(folder, acknowledged)
    return {"hot": hot}


def serve_read_only(_: Say, folder: Path) -> None:
    with closing(open_store(StoreConfig(folder, read_only=True))) as store:
        store.get("a", FINGERPRINT)  # Python's own files may be closed to others, too
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    assert not os.access(folder, os.W_OK)
    try:
        open_store(folder)
    except StoreError as error:
        assert "read_only" in str(error)  # noqa: PT017
    else:
        raise AssertionError("it was opened for writing")
    store = open_store(StoreConfig(folder, read_only=True))
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a", tokens=50))
    assert store.changes(0)[:2] == (1, ["a"])


def read_only(folder: Path) -> dict[str, int]:
    """Serve from a folder without write permission, as somebody who is not root."""
    with closing(DiskStore(folder)) as store:
        store.put(make_entry("a", tokens=50), FINGERPRINT)
    check(folder, {"a"})
    paths = [folder.parent, folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    status = Child(serve_read_only, folder).end()
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return {"status": status}


def main() -> None:
    # The kernel keeps what a dead process wrote: syncs would only make the writers slow.
    leave_out_syncs()
    children.prepare = (leave_out_syncs,)
    tests = (race, kill, points, journal)
    results = {test.__name__: test(Path(sys.argv[1]) / test.__name__) for test in tests}
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        results["read_only"] = read_only(Path(name) / "store")
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    import store_processes  # the children's module: this one would be imported in each of them

    store_processes.main()
