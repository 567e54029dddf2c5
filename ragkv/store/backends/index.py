"""The index of a folder: an SQLite table of keys and bytes.

Each transaction opens a connection of its own. Reads share one, which works on a read-only folder.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ragkv.errors import StoreError, StoreFullError
from ragkv.store.backends.backend import Key, is_key
from ragkv.store.backends.files import make_private_folder, store_errors

LOCK_TIMEOUT_S = 60.0
"""Seconds that a reader or writer waits for another process's transaction."""

_DATABASE = "cache.db"
_creating = threading.Lock()
_DAMAGE = (sqlite3.Error, UnicodeError)  # UnicodeError: SQLite quotes from a damaged file
# A rollback journal, unlike a write-ahead log, can be read from a read-only folder while another
# machine writes. FULL: acknowledged writes survive a loss of power. No memory map: a truncated
# database is an error, not a crash.
_SETTINGS = (
    "PRAGMA journal_mode = TRUNCATE",
    "PRAGMA synchronous = FULL",
    "PRAGMA mmap_size = 0",
)
_OURS = "FROM Cache WHERE typeof(value) = 'blob'"
_GET = f"SELECT value {_OURS} AND key = ?"
_GET_MANY = f"SELECT key, value {_OURS} AND key IN"
_PAGE = (
    f"SELECT key, substr(value, 1, ?), length(value) {_OURS} AND key > ? AND key >= ? AND key < ? "
    "AND key NOT GLOB '*[^A-Za-z0-9_./-]*' ORDER BY key LIMIT 1000"
)
_TABLE = "SELECT rowid, CAST(key AS BLOB), length(value) FROM Cache NOT INDEXED"
_BY_KEY = "Cache_key"
"""The database's index of keys, which can be damaged when the table is not, or the reverse."""

_CREATE_TABLE = (
    "CREATE TABLE IF NOT EXISTS Cache (rowid INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB)"
)
_CREATE_INDEX = f"CREATE UNIQUE INDEX IF NOT EXISTS {_BY_KEY} ON Cache (key)"


class IndexRows:
    """The rows in one write transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._run = connection.execute

    def get(self, key: str) -> bytes | None:
        """Return a row's value; None if there is none, or it is foreign."""
        row: tuple[bytes] | None = self._run(_GET, (key,)).fetchone()
        return None if row is None else row[0]

    def set(self, key: str, value: bytes) -> None:
        """Write a row."""
        self._run(
            "INSERT INTO Cache (key, value) VALUES (?, ?) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, value),
        )

    def delete(self, key: str) -> None:
        """Remove a row if it is there."""
        self._run("DELETE FROM Cache WHERE key = ?", (key,))

    def rebuild(self, own: Sequence[str]) -> list[object]:
        """Rebuild the database's index from its table, with the newest row of each key.

        Return the values of removed rows: older ones, and those with damaged keys not in ``own``.
        """
        self._run(f"DROP INDEX IF EXISTS {_BY_KEY}")
        kept, gone = set[str](), list[object]()
        for row, key, _ in self._run(f"{_TABLE} ORDER BY rowid DESC").fetchall():
            name = _name_of(key)
            if name in kept or not (is_key(name) or name in own):
                gone += self._run("SELECT value FROM Cache WHERE rowid = ?", (row,)).fetchone()
                self._run("DELETE FROM Cache WHERE rowid = ?", (row,))
            kept.add(name)
        self._run(_CREATE_INDEX)
        return gone


class Head(NamedTuple):
    """The beginning of a row's value, and the whole value's bytes."""

    key: str
    start: bytes
    nbytes: int


class Index:
    """Rows from text keys to bytes, shared by threads and processes.

    Parameters
    ----------
    folder
        Folder of the database, which the first transaction creates.
    read_only
        Never write, not even a lock file.

    Raises
    ------
    StoreError
        From every method: the database cannot be used.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._file = folder / _DATABASE
        self._read_only = read_only
        self._closed = False
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._connected_to = (0, 0, 0)  # the process, and the file's device and number
        if not read_only:
            with store_errors(folder):
                make_private_folder(folder)
            if not os.access(folder, os.W_OK):
                raise StoreError(f"{folder} is not writable; open the store read_only")

    def get(self, key: str) -> bytes | None:
        """Return a row's value, or None."""
        rows = self._query(_GET, key)
        return rows[0][0] if rows else None

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of existing rows, in one query."""
        return dict(self._query(f"{_GET_MANY} ({','.join('?' * len(keys))})", *keys))

    def page(self, prefix: str, after: str, start: int) -> list[Head]:
        """Return the next rows by key, at most 1000, with the first ``start`` bytes of each value.

        Their keys begin with ``prefix`` and sort after ``after``.
        """
        rows = self._query(_PAGE, start, after, prefix, prefix + "\x7f")
        return [Head(*row) for row in rows]

    def damaged(self, own: Sequence[str]) -> list[Key]:
        """Return the table's damaged keys not in ``own``, one character for each byte.

        If there are none but index and table differ, return the name of the index.
        """
        rows = [Key(_name_of(key), nbytes or 0) for _, key, nbytes in self._query(_TABLE)]
        found = [row for row in rows if not (is_key(row.name) or row.name in own)]
        if not found and any(_BY_KEY in said for (said,) in self._query("PRAGMA integrity_check")):
            return [Key(f"({_BY_KEY})", 0)]
        return found

    @contextmanager
    def transaction(self) -> Iterator[IndexRows]:
        """Hold the write lock; writes in the block are atomic.

        Raises
        ------
        StoreFullError
            The disk or the quota is full.
        StoreError
            The index is read-only, closed, damaged, or locked for too long.
        """
        if self._read_only:
            raise StoreError(f"the store at {self._file.parent} was opened read-only")
        with self._write_lock:
            if self._closed:
                raise StoreError(f"the store at {self._file.parent} is closed")
            folder = self._file.parent
            with store_errors(folder):
                make_private_folder(folder)
                _create(self._file)
            try:
                with closing(self._connect("rw")) as connection:
                    for setting in _SETTINGS:
                        connection.execute(setting)
                    if connection.execute("PRAGMA auto_vacuum").fetchone() != (1,):
                        connection.execute("PRAGMA auto_vacuum = FULL")  # this writes
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute(_CREATE_TABLE)
                    connection.execute(_CREATE_INDEX)
                    yield IndexRows(connection)
                    connection.execute("COMMIT")  # else closing rolls back
            except _DAMAGE as error:
                raise self._error(error) from error

    def close(self) -> None:
        """Close the connections; using the index afterwards raises StoreError."""
        self._closed = True
        with self._write_lock, self._read_lock:
            self._disconnect()

    def _query(self, statement: str, *arguments: str | int) -> list[tuple[Any, ...]]:
        with self._read_lock:
            if self._closed:
                raise StoreError(f"the store at {self._file.parent} is closed")
            try:
                connection = self._connected()
                return connection.execute(statement, arguments).fetchall() if connection else []
            except _DAMAGE as error:
                self._disconnect()
                if "no such table" in str(error):  # another process is creating it
                    return []
                raise self._error(error) from error

    def _connected(self) -> sqlite3.Connection | None:
        """Return this process's connection to the current file, if there is one."""
        with store_errors(self._file):
            try:
                place = self._file.stat()
            except (FileNotFoundError, NotADirectoryError):
                self._disconnect()
                return None
        to = os.getpid(), place.st_dev, place.st_ino
        if self._connection is None or self._connected_to != to:
            self._disconnect()
            # the next writer rolls back a crashed writer's transaction
            mode = "ro" if self._read_only else "rw"
            self._connection = self._connect(mode)
            self._connected_to = to
        return self._connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self._file.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=LOCK_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )

    def _disconnect(self) -> None:
        if self._connection is not None and self._connected_to[0] == os.getpid():
            self._connection.close()
        self._connection = None

    def _error(self, error: BaseException) -> StoreError:
        if _code_of(error) == sqlite3.SQLITE_FULL:
            return StoreFullError(f"no room left for {self._file}")
        if _code_of(error) == sqlite3.SQLITE_BUSY:
            return StoreError(f"{self._file} stayed locked by another process")
        return StoreError(
            f"cannot use {self._file}: {error}. Open the store read_only if it is not "
            "writable; if it is damaged, repair it with `ragkv store verify --heal`, or remove the "
            f"folder {self._file.parent.parent} and precompute again"
        )


def _name_of(key: bytes | None) -> str:
    return (key or b"").decode("latin-1")


def _create(file: Path) -> None:
    """Create a missing database; SQLite gives its journal the same mode."""
    # POSIX locks belong to the process: closing any descriptor of a file releases those of all
    # its connections. Therefore no database in use is opened here.
    with _creating, suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _code_of(error: BaseException | None) -> int | None:
    """Return SQLite's code of the first error: a failed rollback hides its cause."""
    code = None
    while error is not None:
        code = getattr(error, "sqlite_errorcode", code)
        error = error.__context__
    return code
