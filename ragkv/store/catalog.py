"""What a disk store knows of its entries, kept in the rows of an index.

========================  ==========================================================
``store``                 ``{"format": 1, "namespace": name}``
``count``                 the change number; it only grows
``bytes``                 bytes of all entries' files
``text/<text digest>``    ``{"change": n, "fingerprints": [digest, ...]}``
``entry/<key>``           ``{"change": n, "bytes": size}``
``log/<n>``               the text that change ``n`` put, if it is the text's newest
========================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from blake3 import blake3

from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.header import FORMAT_VERSION
from ragkv.store.index import Index, Rows

INDEX_FORMAT = 1
_LAST_CHANGE = 10**19


class Names(NamedTuple):
    """An entry's names: of its text's row, of its fingerprint, of its own row and file."""

    text_row: str
    fingerprint: str
    key: str

    @property
    def row(self) -> str:
        """Key of the entry's row."""
        return f"entry/{self.key}"

    @classmethod
    def of(cls, text: str, fingerprint: Fingerprint) -> Names:
        """Return the names of a text's entry under a fingerprint."""
        return cls.within(text_row_of(text), _digest(fingerprint))

    @classmethod
    def within(cls, text_row: str, fingerprint: str) -> Names:
        """Return the names of the entry that a text's row lists under a digest."""
        unique = f"{FORMAT_VERSION}/{fingerprint}/{text_row}"
        return cls(text_row, fingerprint, blake3(unique.encode()).hexdigest())


def text_row_of(text: str) -> str:
    """Return the key of a text's row."""
    return f"text/{blake3(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


class Catalog:
    """Reads and changes the rows of one namespace. Sizes are in bytes.

    Raises
    ------
    StoreError
        From every method: the index cannot be read or written.
    """

    def __init__(self, index: Index, namespace: str) -> None:
        self.close = index.close
        self._index = index
        self._owner = {"format": INDEX_FORMAT, "namespace": namespace}
        self._check_owner(index.get("store"))

    @contextmanager
    def transaction(self) -> Iterator[Rows]:
        """Hold the only write lock; what is done inside happens wholly or not at all."""
        with self._index.transaction() as rows:
            if not self._check_owner(rows.get("store")):
                rows.set("store", self._owner)
            yield rows

    def entry(self, names: Names) -> Any:
        """Return the entry's row, None where there is no entry."""
        return self._index.get(names.row)

    def fingerprints(self, names: Names) -> list[str]:
        """Return the digests of the fingerprints under which the text is stored."""
        return _fingerprints(self._index.get(names.text_row))

    def size(self, names: Names) -> int:
        """Return the size of the entry's file."""
        return _number(self._index.get(names.row), "bytes")

    def growth(self, names: Names, nbytes: int, rows: Rows | None = None) -> int:
        """Return the bytes of all files once the entry's file has ``nbytes``."""
        get = self._index.get if rows is None else rows.get
        return _number(get("bytes")) - _number(get(names.row), "bytes") + nbytes

    def keys(self) -> set[str]:
        """Return the keys of all entries."""
        return {key.removeprefix("entry/") for key, _ in self._index.range("entry/", "entry/~")}

    def texts(self, first: int = 0, last: int = _LAST_CHANGE) -> list[str]:
        """Return the texts whose newest change lies in the range, oldest first."""
        rows = self._index.range(_log_row(first), _log_row(last))
        return [text for _, text in rows if isinstance(text, str)]

    def changes(self, since: int) -> tuple[int, list[str]]:
        """Return the change number and the texts changed after ``since``."""
        count = _number(self._index.get("count"))
        if count == since:
            return count, []
        # fewer changes than the caller has seen: the folder was emptied meanwhile
        return count, self.texts(since + 1 if since < count else 1, count)

    def add(self, rows: Rows, names: Names, text: str, nbytes: int) -> None:
        """Enter a file that was written, as a new change."""
        change = _number(rows.get("count")) + 1
        before = rows.get(names.text_row)
        others = [digest for digest in _fingerprints(before) if digest != names.fingerprint]
        rows.set("bytes", self.growth(names, nbytes, rows))
        rows.set("count", change)
        rows.set(names.row, {"change": change, "bytes": nbytes})
        rows.set(names.text_row, {"change": change, "fingerprints": [*others, names.fingerprint]})
        rows.delete(_log_row(_number(before, "change")))
        rows.set(_log_row(change), text)

    def remove(self, rows: Rows, names: Names) -> None:
        """Strike an entry, and its text with the last of its entries."""
        text = rows.get(names.text_row)
        others = [digest for digest in _fingerprints(text) if digest != names.fingerprint]
        rows.set("bytes", max(0, self.growth(names, 0, rows)))
        rows.delete(names.row)
        if others:
            rows.set(names.text_row, {**text, "fingerprints": others})
        else:
            rows.delete(names.text_row)
            rows.delete(_log_row(_number(text, "change")))

    def listed(self, rows: Rows, text: str) -> list[Names]:
        """Return the names of all entries of a text."""
        row = text_row_of(text)
        return [Names.within(row, digest) for digest in _fingerprints(rows.get(row))]

    def _check_owner(self, found: Any) -> bool:
        if found not in (None, self._owner):
            raise StoreError(
                f"the index is of {found}, not of {self._owner}: use the ragkv that wrote it, "
                "or another folder"
            )
        return found is not None


@lru_cache(maxsize=64)
def _digest(fingerprint: Fingerprint) -> str:
    return fingerprint.digest


def _log_row(change: int) -> str:
    return f"log/{change:020}"


def _number(row: Any, name: str | None = None) -> int:
    """Return a row's (or its field's) number; 0 for what is missing or nonsense."""
    value = row if name is None else row.get(name) if isinstance(row, dict) else None
    return value if type(value) is int and value >= 0 else 0


def _fingerprints(row: Any) -> list[str]:
    found = row.get("fingerprints") if isinstance(row, dict) else None
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []
