"""What a store knows of its texts: rows, documents, and a log of what came and went.

No step needs a transaction over several keys, so that any backend will do. Each change
is one row of the log, under a number above all others.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from ragkv.errors import StoreError
from ragkv.store.backends.base import Backend
from ragkv.store.base import has_expired, later
from ragkv.store.catalog.names import (
    CLEARED,
    LAYOUT,
    OWNER,
    Change,
    TextRow,
    change_of,
    digest_of_text,
    entries_of,
    held_key,
    holds_key,
    log_key,
    text_key,
    to_bytes,
    to_text,
)

Item = TypeVar("Item")
_BATCH = 256
_TOLD = 16
KEPT_CHANGES = 1000
"""Newest changes that are never removed."""


class Catalog:
    """Reads and changes the rows of one namespace.

    Threads may share it; what other processes may do at the same time is said in
    docs/store-format.md.

    Raises
    ------
    StoreError
        From every method: the backend fails, or belongs to another namespace or layout.
    """

    def __init__(self, backend: Backend, namespace: str) -> None:
        self._backend = backend
        self._owner = {"format": LAYOUT, "namespace": namespace}
        self._lock = threading.RLock()  # for rows that are read and then written
        self._last_change = 0  # there are at least as many
        self._told: dict[int, bytes] = {}  # newest changes, as they were told
        self._check_owner()

    def row(self, digest: str) -> TextRow | None:
        """Return a text's row."""
        return TextRow.parse(self._backend.get(text_key(digest)), digest)

    def with_rows(self, items: Iterable[tuple[str, Item]]) -> Iterator[tuple[str, TextRow, Item]]:
        """Yield each text's row between its digest and what belongs to it."""
        items = iter(items)
        while batch := list(islice(items, _BATCH)):
            values = self._backend.get_many(text_key(digest) for digest, _ in batch)
            for (digest, item), value in zip(batch, values, strict=True):
                row = TextRow.parse(value, digest)
                if row is not None:
                    yield digest, row, item

    def enter(
        self,
        text: str,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> bool:
        """See that a text's row, time and document are there; return whether the row was."""
        digest = digest_of_text(text)
        with self._lock:
            if not self._check_owner():
                self._backend.put_if_absent(OWNER, [self._owner_row()])
            row = known = self.row(digest)
            if row is None:
                row = TextRow(text, self._append(Change(text=text)), expires_at)
            row = row._replace(expires_at=later(row.expires_at, expires_at))
            if row != known:
                self._backend.put(text_key(digest), [row.to_bytes()])
                told = self._backend.get(log_key(row.change))
                if told != Change(text=text).to_bytes():  # somebody deleted the text meanwhile
                    row = row._replace(change=self._append(Change(text=text)))
                    self._backend.put(text_key(digest), [row.to_bytes()])
            if document is not None:
                holder = digest_of_text(document)
                if self._backend.size(held_key(digest, holder)) is None:
                    self._backend.put(holds_key(holder, digest), [])
                    self._backend.put(held_key(digest, holder), [to_bytes(document)])
        return known is not None

    def strike(self, digest: str, *, entries: bool = True) -> int:
        """Remove a text's row, then its entries; return how many these were."""
        with self._lock:
            row = self.row(digest)
            self._backend.delete(text_key(digest))
            keys = [key.name for key in self._backend.scan(entries_of(digest))] if entries else []
            if row is not None or keys:  # entries alone: an earlier deletion was cut short
                told = list(self._log()) if row is None else [log_key(row.change)]
                for change in told:
                    self._blank(change, digest)
                self._append(Change(digest=digest))
            removed = sum([self._backend.delete(key) for key in keys])
            for key in list(self._backend.scan(held_key(digest, ""))):
                self._backend.delete(holds_key(key.name.split("/")[2], digest))
                self._backend.delete(key.name)
        return removed

    def strike_unused(self, digest: str) -> None:
        """Remove a text's row if it has no entry; one that is just being written survives."""
        with self._lock:
            if any(self._backend.scan(entries_of(digest))):
                return
            row, documents = self.row(digest), self._documents_of(digest)
            self.strike(digest, entries=False)
            # whoever wrote an entry before the row went has not seen it go
            if row is not None and any(self._backend.scan(entries_of(digest))):
                self.enter(row.text, expires_at=row.expires_at)
                for document in documents:
                    self.enter(row.text, document=document, expires_at=row.expires_at)

    def strike_expired(self, digest: str, now: float) -> int | None:
        """Strike a text whose time is over, or that has no row; None for others."""
        with self._lock:
            row = self.row(digest)
            gone = row is None or has_expired(row.expires_at, now)
            return self.strike(digest) if gone else None

    def release(self, document: str, digest: str) -> bool:
        """Take a text from a document; return whether it was deleted, as nobody holds it."""
        holder = digest_of_text(document)
        with self._lock:
            self._backend.delete(held_key(digest, holder))
            free = not any(self._backend.scan(held_key(digest, "")))
            removed = free and self.strike(digest) > 0
            self._backend.delete(holds_key(holder, digest))
        return removed

    def texts_of(self, document: str) -> list[str]:
        """Return the digests of the texts that a document holds."""
        prefix = holds_key(digest_of_text(document), "")
        return [key.name.removeprefix(prefix) for key in self._backend.scan(prefix)]

    def documents(self) -> dict[str, list[str]]:
        """Return the documents that hold a text, by its digest."""
        keys = [key.name for key in self._backend.scan("held/")]
        held: dict[str, list[str]] = {}
        for key, value in zip(keys, self._backend.get_many(keys), strict=True):
            with suppress(ValueError):  # damaged
                _, digest, holder = key.split("/")
                document = to_text(value or b"")
                if digest_of_text(document) == holder:
                    held.setdefault(digest, []).append(document)
        return held

    def _documents_of(self, digest: str) -> list[str]:
        """Return the documents that hold a text."""
        keys = [key.name for key in self._backend.scan(held_key(digest, ""))]
        found = []
        for value in self._backend.get_many(keys):
            with suppress(ValueError):  # damaged
                found.append(to_text(value or b""))
        return [document for document in found if document]

    def digests(self) -> set[str]:
        """Return the digests of all texts that have a row, or that a document holds."""
        kinds = ("text/", "held/")
        return {key.name.split("/")[1] for kind in kinds for key in self._backend.scan(kind)}

    # ---- the log

    def changes(self, since: int) -> tuple[int, list[Change]]:
        """Return the newest change's number, and the changes after ``since``, oldest first.

        Of a place that was emptied since they are all that there are.
        """
        newest, changes, _ = self._changes(since)
        return newest, changes

    def deletions(self, since: int, known: Iterable[str]) -> list[str]:
        """Return the digests of the texts that were deleted after ``since``.

        Where changes after that were removed, or the place was emptied, those of ``known``
        that have no row any more are among them, and all that came since.
        """
        _, changes, emptied = self._changes(since)
        gone = [change.digest for change in changes if change.text is None]
        if emptied or since < self._cleared():
            came = [digest_of_text(change.text) for change in changes if change.text is not None]
            others = set(known).difference(came)
            there = {digest for digest, *_ in self.with_rows((digest, None) for digest in others)}
            gone += [*came, *others.difference(there)]
        return list(dict.fromkeys(gone))

    def _changes(self, since: int) -> tuple[int, list[Change], bool]:
        """Return as :meth:`changes`, and whether the place was emptied after ``since``."""
        # the change last seen is read again: where it is gone, or another, the place was emptied
        keys = list(self._log(since - 1))
        if keys == [log_key(since)]:
            return since, [], False
        if not keys:
            return (*self.changes(0), True) if since > 0 else (0, [], False)
        values = [bytes(value or b"") for value in self._backend.get_many(keys)]
        if change_of(keys[0]) == since:
            if values[0] not in (self._told.get(since, values[0]), b""):  # b"": its text went
                return (*self.changes(0), True)
            del keys[0], values[0]
        newest = change_of(keys[-1])
        with self._lock:
            self._told[newest] = values[-1]
            while len(self._told) > _TOLD:
                del self._told[next(iter(self._told))]
        return newest, [Change.parse(value) for value in values], False

    def clear_log(self, kept: int = KEPT_CHANGES) -> None:
        """Remove changes that say nothing, but not the newest ``kept``.

        Those stay for finders that have yet to learn of a deletion, for a text whose row is
        just being written, and so that numbers only grow.
        """
        keys = list(self._log())
        over = []
        for place, key in enumerate(keys):
            text = Change.parse(self._backend.get(key)).text
            current = text is not None and self._is_current(text, key)
            if not current and place < len(keys) - kept:
                over.append(key)
        if over:
            newest = max(self._cleared(), change_of(over[-1]))
            self._backend.put(CLEARED, [str(newest).encode()])
        for key in over:
            self._backend.delete(key)

    def _cleared(self) -> int:
        """Return the highest number of a change that was removed."""
        number = bytes(self._backend.get(CLEARED) or b"")
        return int(number) if number.isdigit() and len(number) <= 20 else 0

    def _is_current(self, text: str, key: str) -> bool:
        """Whether a text's row names this change; of a text that has no row, tell that it went."""
        digest = digest_of_text(text)
        row = self.row(digest)
        if row is None:  # a deletion was cut short, or the row is just being written
            self._blank(key, digest)
            row = self.row(digest)
            if row is None:
                self._append(Change(digest=digest))
            else:
                self._backend.put(key, [Change(text=text).to_bytes()])
        return row is not None and row.change == change_of(key)

    def _blank(self, key: str, digest: str) -> None:
        """Take a text out of the log; the number is never used again."""
        text = Change.parse(self._backend.get(key)).text
        if text is not None and digest_of_text(text) == digest:
            self._backend.put(key, [])

    def _append(self, change: Change) -> int:
        number = self._newest(self._last_change) + 1  # a lower one that is free was used before
        while not self._backend.put_if_absent(log_key(number), [change.to_bytes()]):
            number = self._newest(number) + 1
        self._last_change = number
        return number

    def _newest(self, known: int) -> int:
        return max(map(change_of, self._log(known)), default=known)

    def _log(self, after: int = 0) -> Iterator[str]:
        keys = self._backend.scan("log/", log_key(after) if after > 0 else "")
        return (key.name for key in keys if change_of(key.name))

    def _check_owner(self) -> bool:
        found = self._backend.get(OWNER)
        if found is not None and not _is_json(bytes(found)):
            raise StoreError(
                "the store's first row cannot be read: it is encrypted and was opened without "
                "encrypt=True, or it is damaged; then empty the place and precompute again"
            )
        if found is not None and bytes(found) != self._owner_row():
            raise StoreError(
                f"the index is of {bytes(found[:300]).decode(errors='replace')}, not of "
                f"{self._owner}: use the ragkv that wrote it, or another place"
            )
        return found is not None

    def _owner_row(self) -> bytes:
        return json.dumps(self._owner).encode()


def _is_json(data: bytes) -> bool:
    with suppress(ValueError):
        return isinstance(json.loads(data), dict)
    return False
