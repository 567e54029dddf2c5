"""The one store over all backends.

A text is registered before its entry is written, and struck before its entries are
deleted; whoever wrote an entry looks again whether its text was struck meanwhile. So
whatever is interrupted, and whoever else is at work, what was left half done is a miss
that the next precompute puts back. See docs/store-format.md.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.backends.base import Backend, Blob, Bytes, length_of
from ragkv.store.base import EntryInfo, Lookup, Opened, Store, has_expired
from ragkv.store.catalog.catalog import Catalog
from ragkv.store.catalog.names import (
    TextRow,
    digest_of_fingerprint,
    digest_of_text,
    entries_of,
    entry_key,
    parse_entry_key,
    text_key,
)
from ragkv.store.entry.format import encode, open_entry
from ragkv.store.entry.header import RefusedEntryError
from ragkv.store.entry.lazy import CorruptEntryError

logger = logging.getLogger(__name__)
_GONE_KEPT = 10_000
"""Texts that were deleted and are still known by name: the last ones."""


class ChunkStore(Store):
    """Keeps one namespace's entries in a backend.

    Parameters
    ----------
    backend
        Holds this namespace and nothing else. Closed together with the store.
    namespace
        Any text.
    read_only
        Write nothing. Damaged entries stay where they are.
    mapped
        True: entries are views into what the backend maps, read without a copy. They must
        not be kept: cutting the file short would end the process. False: entries own their
        memory.

    Raises
    ------
    StoreError
        The backend cannot be reached, or belongs to another namespace or another version.

    Notes
    -----
    While one process forgets a document, another may put the same chunk for another
    document; the chunk may then be gone, a miss until it is precomputed again.
    """

    def __init__(
        self,
        backend: Backend,
        namespace: str = "default",
        *,
        read_only: bool = False,
        mapped: bool = True,
    ) -> None:
        self.backend = backend
        self.far = backend.far
        self.read_only = read_only
        self.mapped = mapped
        self._seen: dict[str, str] = {}  # texts that finders and tiers may know, by digest
        self._gone: dict[str, str] = {}  # those that went, the last at the end
        try:
            self._registry = Catalog(backend, namespace)
        except BaseException:
            backend.close()
            raise

    # ---- entries

    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Read and verify an entry; one that is damaged is removed, to be precomputed again."""
        opened = self.open(text, fingerprint)
        if opened.entry is None:
            return Lookup(None, opened.reason)
        try:
            return Lookup(opened.entry.whole(), expires_at=opened.expires_at)
        except CorruptEntryError as lost:
            return Lookup(None, lost.reason)

    def open(self, text: str, fingerprint: Fingerprint) -> Opened:
        """Find an entry; its layers are read and verified as they are asked for."""
        digest = digest_of_text(text)
        key = entry_key(digest, digest_of_fingerprint(fingerprint))
        try:
            data, blob = self.backend.get_many([text_key(digest), key])
            row = TextRow.parse(data, digest)
            if row is not None and has_expired(row.expires_at, time.time()):
                return Opened(None, "expired")
            if row is None or blob is None:
                others = row is not None and any(
                    other.name != key for other in self.backend.scan(entries_of(digest))
                )
                return Opened(None, "fingerprint" if others else "absent")
            refuse = partial(self._refuse, key, blob)
            try:
                entry = open_entry(blob, text, fingerprint, copy=self._must_copy(blob))
            except RefusedEntryError as refused:
                refuse(refused)
                return Opened(None, refused.reason)
        except (OSError, ValueError) as error:  # it may be readable again later: keep it
            logger.warning("cannot read the chunk cache %s: %s", key, error)
            return Opened(None, "unreadable")
        entry.then(lost=refuse)
        self._seen[digest] = text
        return Opened(entry, expires_at=row.expires_at)

    def put(
        self,
        entry: ChunkKV,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> int:
        """Write an entry; when this returns, it is as durable as the backend can make it."""
        parts = list(encode(entry, fingerprint).parts())
        return self.put_encoded(
            entry.text, fingerprint, parts, document=document, expires_at=expires_at
        )

    def put_encoded(
        self,
        text: str,
        fingerprint: Fingerprint,
        parts: Sequence[Bytes],
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> int:
        """Write an entry's bytes as :func:`ragkv.store.entry.format.encode` made them."""
        self._check_writable()
        digest = digest_of_text(text)
        key = entry_key(digest, digest_of_fingerprint(fingerprint))

        def register() -> bool:
            return self._registry.enter(text, document=document, expires_at=expires_at)

        self.backend.check_room(key, length_of(parts))
        known = register()
        try:
            self.backend.put(key, parts)
        except BaseException:
            if not known:
                with suppress(StoreError):
                    self._registry.strike_unused(digest)
            raise
        if self.backend.size(text_key(digest)) is None:  # deleted meanwhile
            register()
        self._seen[digest] = text
        return length_of(parts)

    def hold(
        self,
        text: str,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> bool:
        """Write what is new of it."""
        self._check_writable()
        there = self.contains(text, fingerprint)
        if there:
            self._registry.enter(text, document=document, expires_at=expires_at)
        return there

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the text's row is there, its time not over, and the entry not torn."""
        digest = digest_of_text(text)
        try:
            if self.backend.size(entry_key(digest, digest_of_fingerprint(fingerprint))) is None:
                return False
            row = self._registry.row(digest)
        except StoreError:
            return False
        return row is not None and not has_expired(row.expires_at, time.time())

    def expiry(self, text: str) -> float | None:
        """Return the time in the text's row."""
        row = self._registry.row(digest_of_text(text))
        return None if row is None else row.expires_at

    def delete(self, text: str) -> int:
        """Remove the text's row, then its entries."""
        self._check_writable()
        return self._registry.strike(digest_of_text(text))

    def keep_only(self, document: str, texts: Iterable[str]) -> int:
        """See :meth:`Store.keep_only`."""
        self._check_writable()
        kept = set(map(digest_of_text, texts))
        gone = [digest for digest in self._registry.texts_of(document) if digest not in kept]
        return sum([self._registry.release(document, digest) for digest in gone])

    # ---- all of them

    def entries(self) -> Iterator[EntryInfo]:
        """Entries in the order of their keys; those of other format versions are left out."""
        documents = self._registry.documents()
        found = groupby(self._entries(), lambda entry: entry[0])
        grouped = ((digest, list(group)) for digest, group in found)
        for digest, row, group in self._registry.with_rows(grouped):
            held_by = tuple(sorted(documents.get(digest, ())))
            for _, fingerprint, nbytes in group:
                yield EntryInfo(row.text, fingerprint, nbytes, held_by, row.expires_at)

    def texts(self) -> Iterator[str]:
        """Texts in the order of their digests."""
        found = groupby(self._entries(), lambda entry: entry[0])
        rows = self._registry.with_rows((digest, None) for digest, _ in found)
        return (row.text for _, row, _ in rows)

    def changes(self, since: int) -> tuple[int, list[str]]:
        """See :meth:`Store.changes`."""
        newest, changes = self._registry.changes(since)
        texts: dict[str, str] = {}
        for change in changes:
            if change.text is not None:
                digest = digest_of_text(change.text)
                texts.pop(digest, None)
                texts[digest] = change.text
        self._seen |= texts
        return newest, list(texts.values())

    def deletions(self, since: int) -> list[str]:
        """See :meth:`Store.deletions`; the texts that were seen here are known by name."""
        known = self._gone | self._seen
        gone = [each for each in self._registry.deletions(since, known) if each in known]
        for digest in gone:  # others may have yet to ask
            self._seen.pop(digest, None)
            self._gone.pop(digest, None)
            self._gone[digest] = known[digest]
        for digest in list(self._gone)[:-_GONE_KEPT]:
            self._gone.pop(digest, None)
        return [known[digest] for digest in gone]

    def gc(self) -> int:
        """Remove expired chunks, and what interrupted writers left.

        Other processes may be writing: they put back what is taken from under them.
        """
        self._check_writable()
        now = time.time()
        removed = 0
        for digest in sorted(self._registry.digests() | {entry[0] for entry in self._entries()}):
            entries = self._registry.strike_expired(digest, now)
            if entries is None:
                self._registry.strike_unused(digest)
            elif entries:
                removed += 1
        self._registry.clear_log()
        return removed

    def close(self) -> None:
        """Close the backend."""
        self.backend.close()

    def _entries(self) -> Iterator[tuple[str, str, int]]:
        """Yield the digests of text and fingerprint of each entry, and its bytes."""
        for key, nbytes in self.backend.scan("kv/"):
            found = parse_entry_key(key)
            if found is not None:
                yield *found, nbytes

    def _refuse(self, key: str, seen: Blob, refused: RefusedEntryError) -> None:
        """Remove a damaged entry, unless it was written again since it was read."""
        logger.warning("unusable chunk cache %s: %s (%s)", key, str(refused), refused.reason)
        if not self.read_only and refused.reason != "codec":
            with suppress(StoreError):
                now = self.backend.get(key)
                if now is not None and memoryview(now) == memoryview(seen):
                    self.backend.delete(key)

    def _must_copy(self, blob: Blob) -> bool:
        # decoding wants memory that may be written to, and that nobody else can change
        return not self.mapped if isinstance(blob, mmap.mmap) else isinstance(blob, bytes)

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError("the store was opened read_only")
