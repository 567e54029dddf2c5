"""A store in a folder: diskcache as the index, one safetensors file for each entry.

A namespace's folder holds ``index/`` (see :mod:`ragkv.store.catalog`) and
``kv/ab/<key>.safetensors``. Files are renamed and removed inside the index's write
transaction, so that no two processes ever disagree on whose file stands under a key. A
crash leaves at worst a file without a row, which the next opening removes, or a row
without a file, which is a miss.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError, StoreFullError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store import files
from ragkv.store.base import Lookup, Store
from ragkv.store.catalog import Catalog, Names
from ragkv.store.format import decode, encode
from ragkv.store.index import Index, Rows

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"


class DiskStore(Store):
    """Keeps one namespace's entries in a folder that several processes share.

    Parameters
    ----------
    path
        The store's folder, above the namespaces' folders.
    namespace
        Any text.
    budget
        Bytes that the namespace's files may take; None for no limit.
    read_only
        Write nothing: no entry, no lock file. Damaged entries stay where they are.
    mapped
        True: entries are views into a private mapping of their file, read without a
        copy. They must not be kept: cutting the file short would end the process. False:
        entries own their memory.

    Raises
    ------
    StoreError
        The folder cannot be used, belongs to another namespace or a newer ragkv.
    """

    def __init__(
        self,
        path: str | Path,
        namespace: str = "default",
        *,
        budget: float | None = None,
        read_only: bool = False,
        mapped: bool = True,
    ) -> None:
        root = Path(path).expanduser().absolute()
        if read_only and not root.is_dir():
            raise StoreError(f"there is no store at {root} to be opened read_only")
        self.folder = root / folder_name(namespace)
        self.budget = budget
        self.read_only = read_only
        self.mapped = mapped
        self._files = self.folder / "kv"
        index = Index(self.folder / "index", read_only=read_only)
        try:
            self._catalog = Catalog(index, namespace)
            if not read_only:
                self._sweep()
        except OSError as error:
            index.close()
            raise files.store_error(error, self.folder) from error

    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Read and verify an entry; one that is damaged is removed, to be precomputed again."""
        names = Names.of(text, fingerprint)
        try:
            row = self._catalog.entry(names)
            if row is None:
                known = self._catalog.fingerprints(names)
                return Lookup(None, "fingerprint" if known else "absent")
            lookup = self._read(names, text, fingerprint)
        except FileNotFoundError:
            lookup = Lookup(None, "unreadable")
        except (OSError, ValueError) as error:  # it may be readable again later: keep it
            logger.warning("cannot read the chunk cache %s: %s", names.key, error)
            return Lookup(None, "unreadable")
        if lookup.entry is None and not self.read_only:
            with suppress(OSError):
                self._drop(names, row)
        return lookup

    def put(self, entry: ChunkKV, fingerprint: Fingerprint) -> int:
        """Write an entry; when this returns, it survives a crash and a loss of power."""
        if self.read_only:
            raise StoreError(f"the store at {self.folder} was opened read_only")
        names = Names.of(entry.text, fingerprint)
        encoded = encode(entry, fingerprint)
        target = self._file(names)
        try:
            self._check_room(names, encoded.nbytes)
            temporary = files.write_temporary(target.parent, encoded.parts())
            placed = False
            try:
                with self._catalog.transaction() as rows:
                    self._check_room(names, encoded.nbytes, rows)
                    self._catalog.add(rows, names, entry.text, encoded.nbytes)
                    placed = True
                    temporary.replace(target)
                    files.sync_folder(target.parent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                if placed:
                    self._remove_orphans([target])
                raise
        except OSError as error:
            raise files.store_error(error, target) from error
        return encoded.nbytes

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the entry's row is there, and its file in full length."""
        names = Names.of(text, fingerprint)
        try:
            size = self._catalog.size(names)
            return size > 0 and self._file(names).stat().st_size == size
        except OSError:
            return False

    def delete(self, text: str) -> int:
        """Remove the chunk's files and rows."""
        try:
            with self._catalog.transaction() as rows:
                listed = self._catalog.listed(rows, text)
                for names in listed:
                    self._remove(rows, names)
        except OSError as error:
            raise files.store_error(error, self.folder) from error
        return len(listed)

    def changes(self, since: int) -> tuple[int, list[str]]:
        """See :meth:`Store.changes`; where the index cannot be read, nothing has changed."""
        try:
            return self._catalog.changes(since)
        except OSError as error:
            logger.warning("cannot read the store's changes: %s", error)
            return since, []

    def texts(self) -> Iterator[str]:
        """Texts in the order of their last change."""
        return iter(self._catalog.texts())

    def close(self) -> None:
        """Close the index."""
        self._catalog.close()

    def _read(self, names: Names, text: str, fingerprint: Fingerprint) -> Lookup:
        path = self._file(names)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # nothing that could be mapped
                return decode(b"", text, fingerprint, place=path)
            # copy-on-write: torch wants memory that may be written to
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if hasattr(mapping, "madvise"):
            mapping.madvise(mmap.MADV_WILLNEED)
        return decode(mapping, text, fingerprint, copy=not self.mapped, place=path)

    def _check_room(self, names: Names, nbytes: int, rows: Rows | None = None) -> None:
        if self.budget is None:
            return
        total = self._catalog.growth(names, nbytes, rows)
        if total > self.budget:
            raise StoreFullError(
                f"{total} bytes in {self.folder} would exceed the limit of {self.budget}: "
                "raise disk_bytes, or forget chunks"
            )

    def _remove(self, rows: Rows, names: Names) -> None:
        """Remove the file, then the rows: what was forgotten never comes back."""
        self._file(names).unlink(missing_ok=True)
        self._catalog.remove(rows, names)

    def _drop(self, names: Names, seen: Any) -> None:
        """Remove a damaged entry, unless it was written again since its row was read."""
        with self._catalog.transaction() as rows:
            if rows.get(names.row) == seen:
                self._remove(rows, names)

    def _sweep(self) -> None:
        """Remove what crashed writers left: old temporary files, files without a row."""
        found = [path for folder in _scan(self._files) for path in _scan(folder)]
        kept = self._catalog.keys()
        self._remove_orphans([p for p in found if p.suffix == _SUFFIX and p.stem not in kept])
        for path in found:
            if path.name.startswith(files.TEMPORARY_PREFIX) and files.is_abandoned(path):
                path.unlink(missing_ok=True)

    def _remove_orphans(self, suspects: list[Path]) -> None:
        if not suspects:
            return
        with suppress(OSError), self._catalog.transaction() as rows:
            for path in suspects:
                if rows.get(f"entry/{path.stem}") is None:
                    path.unlink(missing_ok=True)

    def _file(self, names: Names) -> Path:
        return self._files / names.key[:2] / f"{names.key}{_SUFFIX}"


def folder_name(namespace: str) -> str:
    """Return the one folder name of a namespace: readable, and distinct by its hash."""
    digest = blake3(namespace.encode("utf-8", "surrogatepass")).hexdigest(length=16)
    return f"{re.sub('[^A-Za-z0-9]+', '-', namespace)[:32]}-{digest}"


def _scan(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
