"""A folder: SQLite as the index, one file for each large value.

``index/`` has a row for every key (:mod:`ragkv.store.backends.index`), ``kv/ab/`` the files, and
``reserve`` the room that the index needs for deletions on a full disk.

A file is written once, under a unique name, and never changed. The key's row names the file of its
value, so one commit of the index replaces a value. Files get their names inside the index's write
transaction, so that no process takes another's new file for the remains of a crash.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from blake3 import blake3

from ragkv.errors import StoreError, StoreFullError
from ragkv.store.backends import files
from ragkv.store.backends.backend import Backend, Blob, Bytes, Key, check_key, is_key, length_of
from ragkv.store.backends.index import Index, IndexRows

_log = logging.getLogger(__name__)
INLINE_BYTES = 4096
"""Values up to this length are stored in the index."""

_BATCH_KEYS = 256
_RESERVE_BYTES = 1 << 17
_SUFFIX = ".safetensors"
_OURS = re.compile(rf"([0-9a-f]{{2}})/\1[0-9a-f]{{30}}-[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
"""Folder and name of a value's file; other files are ignored."""
# a row is a file's token and size, or "=" and the value
_FILE_ROW = re.compile(rb">([0-9a-f]{16}) ([0-9]{1,15})")
_FILE_ROW_BYTES = 40
Result = TypeVar("Result")
_BYTES = "!bytes"  # row of the bytes of all files; no key begins with "!"
_CLEAN = "!clean"  # row of the folders that were clean, and their times then
_OWN = (_BYTES, _CLEAN)
_SETTLES_NS = 3_000_000_000  # after this a change of a folder shows in its time


class DiskBackend(Backend):
    """Stores values in a folder that several processes share.

    Parameters
    ----------
    folder
        Created if missing, readable only by its owner.
    budget
        Most bytes of all large values together; None for no limit.
    read_only
        Write nothing, not even a lock file.

    Raises
    ------
    StoreError
        The folder cannot be used.
    """

    def __init__(
        self, folder: str | Path, *, budget: float | None = None, read_only: bool = False
    ) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.budget = budget
        self.read_only = read_only
        self._files = self.folder / "kv"
        self._reserve = self.folder / "reserve"
        self._index = Index(self.folder / "index", read_only=read_only)
        if not read_only:
            try:
                with files.store_errors(self.folder):
                    self._sweep()
            except BaseException:
                self._index.close()
                raise

    def get(self, key: str) -> Blob | None:
        """Return the value; a file as a private mapping, which is read on access."""
        gone: Blob = b""
        return self._use(key, lambda value: value, lambda path, _: _mapped(path), gone)

    def get_many(self, keys: Iterable[str]) -> Iterator[Blob | None]:
        """Read the rows of many keys in one query, then their files."""
        rest = iter(keys)
        while batch := list(islice(rest, _BATCH_KEYS)):
            found = self._index.get_many(batch)
            for key in batch:
                row = _parse(found.get(key))
                in_file = row is not None and row.value is None
                yield self.get(key) if in_file else row and row.value

    def size(self, key: str) -> int | None:
        """Return the row's length if the file has it."""

        def of_file(path: Path, nbytes: int) -> int | None:
            return nbytes if path.stat().st_size == nbytes else None

        return self._use(key, len, of_file, None)

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        """Write a value; afterwards it survives a crash and a loss of power."""
        self._put(key, parts, absent=False)

    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Write a value unless there is one; the index's write lock makes this atomic."""
        return self._look(key) is None and self._put(key, parts, absent=True)

    def delete(self, key: str) -> bool:
        """Remove a value's file, then its row: a deleted value never returns.

        On a full file system the index cannot be written, not even for a deletion: then the
        reserve is removed to make room.
        """
        try:
            return self._delete(key)
        except StoreFullError as full:
            try:
                self._reserve.unlink()
            except OSError:
                raise full from None
            return self._delete(key)

    def _delete(self, key: str) -> bool:
        with files.store_errors(self.folder), self._index.transaction() as rows:
            if not is_key(key):
                gone = rows.rebuild(_OWN)
                for value in gone:
                    self._account(rows, _parse(value), None)
                return len(gone) > 0
            row = _parse(rows.get(key))
            if row is not None and row.value is None:
                self._path(key, row).unlink(missing_ok=True)
            self._account(rows, row, None)
            rows.delete(key)
        if row is not None and row.value is None:
            self._keep_reserve()
        return row is not None

    def listed(self, prefix: str, after: str = "") -> Iterator[Key]:
        """Yield keys by pages of the index; later pages include keys added meanwhile."""
        after = max(after, "/")  # after this backend's own rows
        while page := self._index.page(prefix, after, _FILE_ROW_BYTES):
            for key, start, nbytes in page:
                row = _parse(start)
                if row is not None:
                    yield Key(key, row.nbytes if row.value is None else nbytes - 1)
            after = page[-1].key

    def damaged_keys(self) -> Iterator[Key]:
        """Yield the damaged keys of the whole table: its index can be damaged itself."""
        return iter(self._index.damaged(_OWN))

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def _look(self, key: str) -> _FileRow | None:
        return _parse(self._index.get(key)) if is_key(key) else None

    def _use(
        self,
        key: str,
        inline: Callable[[bytes], Result],
        file: Callable[[Path, int], Result],
        gone: Result,
    ) -> Result | None:
        """Return one function's result for the value, or ``gone`` if its file is missing."""
        row = self._look(key)
        while row is not None:
            if row.value is not None:
                return inline(row.value)
            path = self._path(key, row)
            with files.store_errors(path):
                try:
                    return file(path, row.nbytes)
                except FileNotFoundError:  # replaced by another process, or lost
                    before, row = row, self._look(key)
                    if row == before:
                        return gone
        return None

    def _put(self, key: str, parts: Sequence[Bytes], *, absent: bool) -> bool:
        nbytes = length_of(parts)
        with files.store_errors(self.folder):
            if nbytes <= INLINE_BYTES:
                return self._enter(key, _FileRow(nbytes, b"".join(parts)), None, absent=absent)
            row = _FileRow(nbytes, None, secrets.token_hex(8))
            self.check_room(key, nbytes)
            self._keep_reserve()
            temporary = files.write_temporary(self._path(key, row).parent, parts)
            try:
                return self._enter(key, row, temporary, absent=absent)
            except BaseException:
                self._undo(key, row)
                raise
            finally:
                temporary.unlink(missing_ok=True)

    def _keep_reserve(self) -> None:
        with suppress(OSError):
            if not self._reserve.exists():
                # random: a compressing file system would reserve nothing for zeros
                made = files.write_temporary(self.folder, [os.urandom(_RESERVE_BYTES)])
                made.replace(self._reserve)

    def _enter(self, key: str, row: _FileRow, temporary: Path | None, *, absent: bool) -> bool:
        """Set a key's row, then rename the synced file to the name that the row has."""
        with self._index.transaction() as rows:
            old = _parse(rows.get(check_key(key)))
            if absent and old is not None:
                return False
            self._account(rows, old, row)
            rows.set(key, row.to_bytes())
            if temporary is not None:
                target = self._path(key, row)
                temporary.replace(target)
                files.sync_folder(target.parent)
        if old is not None and old.value is None:
            with suppress(OSError):  # the next opening removes it
                self._path(key, old).unlink(missing_ok=True)
        return True

    def _account(self, rows: IndexRows, old: _FileRow | None, new: _FileRow | None) -> None:
        growth = _file_bytes(new) - _file_bytes(old)
        if growth:
            total = self._check_room(growth, rows.get(_BYTES))
            rows.set(_BYTES, str(max(0, total)).encode())

    def check_room(self, key: str, nbytes: int) -> None:
        """Compare with the folder's limit."""
        if nbytes > INLINE_BYTES:
            self._check_room(nbytes - _file_bytes(self._look(key)), self._index.get(_BYTES))

    def free_bytes(self) -> tuple[int, str] | None:
        """Return the free bytes of the folder's file system."""
        with suppress(OSError):
            return shutil.disk_usage(self.folder).free, str(self.folder.parent)
        return None

    def _check_room(self, growth: int, total: bytes | None) -> int:
        """Return the bytes of all files after the change; raise StoreFullError above the limit."""
        after = (int(total) if total and total.isdigit() else 0) + growth
        if growth > 0 and self.budget is not None and after > self.budget:
            raise StoreFullError(
                f"{after} bytes in {self.folder} would exceed the limit of {self.budget}: "
                "raise disk_bytes, or forget chunks"
            )
        return after

    def _undo(self, key: str, row: _FileRow) -> None:
        """Remove the file of a failed write, unless it became the key's value."""
        path = self._path(key, row)
        if path.exists():
            with suppress(OSError), self._index.transaction() as rows:
                if _parse(rows.get(key)) != row:
                    path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove the remains of crashed writers: old temporary files, files without a row.

        Folders that have not changed since they were clean are skipped.
        """
        known, settled = _stamps_in(self._index.get(_CLEAN)), time.time_ns() - _SETTLES_NS
        stamps = {p: p.stat().st_mtime_ns for p in _listed(self._files) if not p.is_symlink()}
        clean = {p.name: at for p, at in stamps.items() if known.get(p.name) == at}
        found = [each for p in stamps if p.name not in clean for each in _listed(p)]
        ours = {path for path in found if _OURS.fullmatch(f"{path.parent.name}/{path.name}")}
        orphans = ours and ours - self._named()
        if orphans:
            with self._index.transaction():  # excludes files that are just being entered
                for path in orphans - self._named():
                    _remove(path)
        temporary = [path for path in found if path.name.startswith(files.TEMPORARY_PREFIX)]
        for path in filter(files.is_abandoned, temporary):
            _remove(path)
        unsure = {path.parent for path in (*orphans, *temporary)}
        clean |= {p.name: at for p, at in stamps.items() if p not in unsure and at < settled}
        if clean != known:
            with suppress(StoreError), self._index.transaction() as rows:
                rows.set(_CLEAN, json.dumps(clean).encode())

    def _named(self) -> set[Path]:
        """Return the files named by rows."""
        named, after = set(), "/"
        while page := self._index.page("", after, _FILE_ROW_BYTES):
            for key, start, _ in page:
                row = _parse(start)
                if row is not None and row.value is None:
                    named.add(self._path(key, row))
            after = page[-1].key
        return named

    def _path(self, key: str, row: _FileRow) -> Path:
        name = blake3(key.encode()).hexdigest(length=16)
        return self._files / name[:2] / f"{name}-{row.token}{_SUFFIX}"


class _FileRow(NamedTuple):
    """A row: a value, or the size of its file and the token in the file's name."""

    nbytes: int
    value: bytes | None
    token: str = ""

    def to_bytes(self) -> bytes:
        return f">{self.token} {self.nbytes}".encode() if self.value is None else b"=" + self.value


def _parse(data: object) -> _FileRow | None:
    if not isinstance(data, bytes):
        return None
    if data.startswith(b"="):
        return _FileRow(len(data) - 1, data[1:])
    match = _FILE_ROW.fullmatch(data)
    return None if match is None else _FileRow(int(match[2]), None, match[1].decode())


def _file_bytes(row: _FileRow | None) -> int:
    return 0 if row is None or row.value is not None else row.nbytes


def _stamps_in(row: bytes | None) -> dict[str, int]:
    with suppress(ValueError):
        found = json.loads(row or b"{}")
        return found if isinstance(found, dict) else {}
    return {}


def _mapped(path: Path) -> Blob:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # cannot be mapped
            return b""
        # copy-on-write: torch needs writable memory
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _remove(path: Path) -> None:
    """Remove an unused file; one that cannot be removed, such as a folder, is logged."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("cannot remove %s: %s", path, error)


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
