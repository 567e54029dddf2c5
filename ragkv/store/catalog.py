"""The catalog of a store: the texts' rows, their documents, and a log of changes.

No step needs a transaction over several keys, so every backend suffices. Each change is a row of
the log, with a number above all earlier ones.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice, tee
from typing import TypeVar

from ragkv.errors import StoreError
from ragkv.store.backends.backend import Backend
from ragkv.store.names import (
    CLEARED,
    LAYOUT,
    OWNER,
    Change,
    TextRow,
    behind_key,
    change_of,
    digest_of_text,
    entries_of,
    held_key,
    holds_key,
    log_key,
    parse_behind_key,
    text_key,
    to_bytes,
    to_text,
    versions_of,
)
from ragkv.store.types import Terms, has_expired, later

Item = TypeVar("Item")
_BATCH = 256
_LOGGED_KEPT = 16
KEPT_CHANGES = 1000
"""Number of the newest changes, which are never compacted."""


class Catalog:
    """Reads and changes the rows of one namespace.

    Threads can share it; for processes see docs/store-format.md.

    Raises
    ------
    StoreError
        From every method: the backend fails, or belongs to another namespace or layout.
    """

    def __init__(self, backend: Backend, namespace: str) -> None:
        self._backend = backend
        self._owner = {"format": LAYOUT, "namespace": namespace}
        self._lock = threading.RLock()  # for rows that are read and then written
        self._last_change = 0  # a lower bound
        self._logged: dict[int, bytes] = {}  # rows of the newest changes
        self._check_owner()

    def row(self, digest: str) -> TextRow | None:
        """Return a text's row."""
        return TextRow.parse(self._backend.get(text_key(digest)), digest)

    def with_rows(self, items: Iterable[tuple[str, Item]]) -> Iterator[tuple[str, TextRow, Item]]:
        """Yield each item's text row between its digest and the item."""
        items = iter(items)
        while batch := list(islice(items, _BATCH)):
            values = self._backend.get_many(text_key(digest) for digest, _ in batch)
            for (digest, item), value in zip(batch, values, strict=True):
                row = TextRow.parse(value, digest)
                if row is not None:
                    yield digest, row, item

    def add(self, text: str, terms: Terms = Terms()) -> bool:
        """Write a text's row, expiry time and document; return whether there was a row."""
        digest = digest_of_text(text)
        with self._lock:
            if not self._check_owner():
                self._backend.put_if_absent(OWNER, [self._owner_row()])
            row = known = self.row(digest)
            if row is None:
                row = TextRow(text, self._append(Change(text=text)), terms.expires_at)
            row = row._replace(expires_at=later(row.expires_at, terms.expires_at))
            if row != known:
                self._backend.put(text_key(digest), [row.to_bytes()])
                logged = bytes(self._backend.get(log_key(row.change)) or b"")
                if logged != Change(text=text).to_bytes():  # another process deleted it meanwhile
                    row = row._replace(change=self._append(Change(text=text)))
                    self._backend.put(text_key(digest), [row.to_bytes()])
            if terms.document is not None:
                holder = digest_of_text(terms.document)
                known_as = self._backend.get(holds_key(holder, digest))
                if known_as is None or bytes(known_as) != to_bytes(terms.revision):
                    self._backend.put(holds_key(holder, digest), [to_bytes(terms.revision)])
                if self._backend.size(held_key(digest, holder)) is None:
                    self._backend.put(held_key(digest, holder), [to_bytes(terms.document)])
        return known is not None

    def delete(self, digest: str, *, entries: bool = True) -> int:
        """Delete a text; return how many entries it had.

        The order is: its row, its name in the log, its entries, versions of it and behind it, its
        documents. Another call, or ``gc``, completes an interrupted deletion. The log notifies
        finders and tiers of other processes.
        """
        with self._lock:
            row = self.row(digest)
            self._backend.delete(text_key(digest))
            keys = [key.name for key in self._backend.scan(entries_of(digest))] if entries else []
            if row is not None or keys:  # only entries: an interrupted deletion
                logged = list(self._log()) if row is None else [log_key(row.change)]
                for change in logged:
                    self._blank(change, digest)
                self._append(Change(digest=digest))
            removed = sum([self._backend.delete(key) for key in keys])
            for key in list(self._backend.scan(versions_of(digest))):
                self._backend.delete(key.name)
            for key in list(self._backend.scan(behind_key(digest, ""))):
                self._drop_behind(key.name)
            for key in list(self._backend.scan(held_key(digest, ""))):
                self._backend.delete(holds_key(key.name.split("/")[2], digest))
                self._backend.delete(key.name)
        return removed

    def note_behind(self, texts: Iterable[str], version: str) -> None:
        """Note the key of a version that was computed behind these texts."""
        for text in texts:
            self._backend.put(behind_key(digest_of_text(text), version), [])

    def drop_unused_versions(self) -> None:
        """Delete versions of and behind texts without a row, and notes of deleted versions."""
        for key in list(self._backend.scan("version/")):
            if self.row(key.name.split("/")[1]) is None:
                self._backend.delete(key.name)
        for key in list(self._backend.scan("behind/")):
            found = parse_behind_key(key.name)
            if found and (self.row(found[0]) is None or self._backend.size(found[1]) is None):
                self._drop_behind(key.name)

    def _drop_behind(self, key: str) -> None:
        """Delete a version, then the key that names it."""
        found = parse_behind_key(key)
        if found is not None:
            self._backend.delete(found[1])
        self._backend.delete(key)

    def delete_unused(self, digest: str) -> None:
        """Delete a text's row if it has no entry, unless one is just being written."""
        with self._lock:
            if any(self._backend.scan(entries_of(digest))):
                return
            row, held = self.row(digest), self.held_by(digest)
            self.delete(digest, entries=False)
            # a writer that finished before the deletion did not restore the row
            if row is not None and any(self._backend.scan(entries_of(digest))):
                for document, revision in held.items() or ((None, ""),):
                    self.add(row.text, Terms(document, row.expires_at, revision))

    def delete_expired(self, digest: str, now: float) -> int | None:
        """Delete an expired text, or one without a row; return its entries, None if it stays."""
        with self._lock:
            row = self.row(digest)
            gone = row is None or has_expired(row.expires_at, now)
            return self.delete(digest) if gone else None

    def drop_holder(self, document: str, digest: str, revision: str | None = None) -> bool:
        """Remove a text from a document, unless it is of the given revision.

        Return whether the text had no other document and was deleted.
        """
        holder = digest_of_text(document)
        with self._lock:
            known_as = self._backend.get(holds_key(holder, digest)) or b""
            if revision is not None and bytes(known_as) == to_bytes(revision):
                return False
            self._backend.delete(held_key(digest, holder))
            free = not any(self._backend.scan(held_key(digest, "")))
            removed = free and self.delete(digest) > 0
            self._backend.delete(holds_key(holder, digest))
        return removed

    def texts_of(self, document: str) -> list[str]:
        """Return the digests of a document's texts."""
        prefix = holds_key(digest_of_text(document), "")
        return [key.name.removeprefix(prefix) for key in self._backend.scan(prefix)]

    def documents(self, digest: str = "") -> dict[str, list[str]]:
        """Return the documents of each text, or of one, by digest."""
        keys = [key.name for key in self._backend.scan(f"held/{digest}")]
        held: dict[str, list[str]] = {}
        for key, value in zip(keys, self._backend.get_many(keys), strict=True):
            with suppress(ValueError):  # damaged
                _, text, holder = key.split("/")
                document = to_text(value or b"")
                if digest_of_text(document) == holder:
                    held.setdefault(text, []).append(document)
        return held

    def held_by(self, digest: str) -> dict[str, str]:
        """Return a text's documents and their revisions."""
        documents = self.documents(digest).get(digest, [])
        keys = [holds_key(digest_of_text(document), digest) for document in documents]
        values = self._backend.get_many(keys)
        return {name: to_text(value or b"") for name, value in zip(documents, values, strict=True)}

    def digests(self) -> set[str]:
        """Return the digests of all texts that have a row or a document."""
        kinds = ("text/", "held/")
        return {key.name.split("/")[1] for kind in kinds for key in self._backend.scan(kind)}

    # ---- the log

    def changes(
        self, since: int, known: Callable[[], set[str]]
    ) -> tuple[int, dict[str, str], list[str]]:
        """Return the changes after ``since``.

        Parameters
        ----------
        known
            Returns the digests of all texts that the caller knows.

        Returns
        -------
        newest, added, removed
            The newest change's number; the added texts by digest, oldest first; the digests of
            removed texts. If changes after ``since`` were compacted, or the place was emptied,
            these are all known texts without a row, and all added ones.
        """
        behind, emptied = self._behind(since)
        newest, value = 0 if emptied else since, None
        added: dict[str, str] = {}
        removed: dict[str, None] = {}
        for newest, value in behind:  # noqa: B007
            change = Change.parse(value)
            if change.text is None:
                removed[change.digest] = None
            else:
                digest = digest_of_text(change.text)
                added.pop(digest, None)
                added[digest] = change.text
        if value is not None:
            with self._lock:
                self._logged[newest] = value
                while len(self._logged) > _LOGGED_KEPT:
                    del self._logged[next(iter(self._logged))]
        if emptied or (newest != since and since < self._compacted()):
            removed |= dict.fromkeys(added)
            others = known().difference(added)
            alive = {digest for digest, *_ in self.with_rows((digest, None) for digest in others)}
            removed |= dict.fromkeys(others.difference(alive))
        return newest, added, list(removed)

    def _behind(self, since: int) -> tuple[Iterator[tuple[int, bytes]], bool]:
        """Return the changes, each with its row, and whether the place was emptied since then."""
        # if change `since` is missing or differs, the place was emptied
        keys = self._log(since - 1)
        head = list(islice(keys, 2))
        if head[:1] == [log_key(since)]:
            value = bytes(self._backend.get(head[0]) or b"") if head[1:] else b""
            if value not in (self._logged.get(since, value), b""):  # b"": its text was deleted
                return self._behind(0)[0], True
            del head[0]
        elif not head and since > 0:
            return self._behind(0)[0], True
        keys, names = tee(chain(head, keys))
        values = (bytes(value or b"") for value in self._backend.get_many(keys))
        return zip(map(change_of, names), values, strict=True), False

    def compact_log(self, kept: int = KEPT_CHANGES) -> None:
        """Delete obsolete changes except the newest ``kept``.

        These stay for finders that are behind, for texts whose row is just being written, and so
        that numbers only grow.
        """
        keys = list(self._log())
        over = []
        for place, key in enumerate(keys):
            text = Change.parse(self._backend.get(key)).text
            current = text is not None and self._is_current(text, key)
            if not current and place < len(keys) - kept:
                over.append(key)
        if over:
            newest = max(self._compacted(), change_of(over[-1]))
            self._backend.put(CLEARED, [str(newest).encode()])
        for key in over:
            self._backend.delete(key)

    def _compacted(self) -> int:
        """Return the highest number of a compacted change."""
        number = bytes(self._backend.get(CLEARED) or b"")
        return int(number) if number.isdigit() and len(number) <= 20 else 0

    def _is_current(self, text: str, key: str) -> bool:
        """Whether a text's row has this change; log the deletion of a text without a row."""
        digest = digest_of_text(text)
        row = self.row(digest)
        if row is None:  # an interrupted deletion, or the row is just being written
            self._blank(key, digest)
            row = self.row(digest)
            if row is None:
                self._append(Change(digest=digest))
            else:
                self._backend.put(key, [Change(text=text).to_bytes()])
        return row is not None and row.change == change_of(key)

    def _blank(self, key: str, digest: str) -> None:
        """Blank a text's change in the log; its number is never used again."""
        text = Change.parse(self._backend.get(key)).text
        if text is not None and digest_of_text(text) == digest:
            self._backend.put(key, [])

    def _append(self, change: Change) -> int:
        number = self._newest(self._last_change) + 1  # lower free numbers were used before
        while not self._backend.put_if_absent(log_key(number), [change.to_bytes()]):
            number = self._newest(number) + 1
        self._last_change = number
        if self._backend.private and number % KEPT_CHANGES == 0:  # memory has no gc command
            self.compact_log()
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
                "the store's first row is damaged: empty the place and precompute again"
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
