"""The one store over all backends.

A text's row is written before its entry, and deleted before its entries; after writing an
entry the row is checked again. So whatever is interrupted, and whatever other processes do,
half-done work is a miss that the next precompute repairs. See docs/store-format.md.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby

from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.backends.base import Backend, Blob, Bytes, length_of
from ragkv.store.base import Changes, EntryInfo, Found, Room, Store, Terms, has_expired
from ragkv.store.catalog.catalog import Catalog
from ragkv.store.catalog.names import (
    TextRow,
    digest_of_fingerprint,
    digest_of_text,
    entries_of,
    entry_key,
    parse_entry_key,
    text_key,
    version_key,
    versions_of,
)
from ragkv.store.entry.format import encode, open_entry
from ragkv.store.entry.header import RefusedEntryError, read_header
from ragkv.store.entry.lazy import CorruptEntryError
from ragkv.store.versions.stored import to_field, version_in
from ragkv.store.versions.version import Version

logger = logging.getLogger(__name__)
_DELETED_KEPT = 10_000
"""Deleted texts that are remembered by name: the last ones."""


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
        True: entries are views into the backend's memory maps, without a copy. They must
        not be kept: truncating the file would end the process. False: entries own their
        memory.

    Raises
    ------
    StoreError
        The backend cannot be reached, or belongs to another namespace or another version.

    Notes
    -----
    When one process forgets a document while another puts the same chunk for another
    document, the chunk may be deleted: a miss until it is precomputed again.
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
        self.remote = backend.remote
        self.read_only = read_only
        self.mapped = mapped
        self._seen: dict[str, str] = {}  # texts that finders and tiers may know, by digest
        self._deleted: dict[str, str] = {}  # deleted ones, the last at the end
        try:
            self._catalog = Catalog(backend, namespace)
        except BaseException:
            backend.close()
            raise

    # ---- entries

    def open(self, text: str, fingerprint: Fingerprint) -> Found[LayeredKV]:
        """Find an entry; its layers are lazy. A damaged entry is deleted."""
        digest = digest_of_text(text)
        key = entry_key(digest, digest_of_fingerprint(fingerprint))
        try:
            data, blob = self.backend.get_many([text_key(digest), key])
            row = TextRow.parse(data, digest)
            if row is not None and has_expired(row.expires_at, time.time()):
                return Found(None, "expired")
            if row is None or blob is None:
                others = row is not None and any(
                    other.name != key for other in self.backend.scan(entries_of(digest))
                )
                return Found(None, "fingerprint" if others else "absent")
            refuse = partial(self._refuse, key, blob)
            try:
                entry = open_entry(blob, text, fingerprint, copy=self._must_copy(blob))
            except RefusedEntryError as refused:
                refuse(refused)
                return Found(None, refused.reason)
        except (OSError, ValueError) as error:  # may be temporary: keep it
            logger.warning("cannot read the chunk cache %s: %s", key, error)
            return Found(None, "unreadable")
        entry.on_corrupt(refuse)
        self._seen[digest] = text
        return Found(entry, expires_at=row.expires_at)

    def put(self, entry: ChunkKV, fingerprint: Fingerprint, terms: Terms = Terms()) -> int:
        """Write an entry; when this returns, it is as durable as the backend can make it."""
        parts = list(encode(entry, fingerprint).parts())
        return self.put_encoded(entry.text, fingerprint, parts, terms)

    def put_encoded(
        self,
        text: str,
        fingerprint: Fingerprint,
        parts: Sequence[Bytes],
        terms: Terms = Terms(),
    ) -> int:
        """Write an entry's bytes as :func:`ragkv.store.entry.format.encode` made them."""
        self._check_writable()
        digest = digest_of_text(text)
        key = entry_key(digest, digest_of_fingerprint(fingerprint))

        self.backend.check_room(key, length_of(parts))
        known = self._catalog.add(text, terms)
        try:
            self.backend.put(key, parts)
        except BaseException:
            if not known:
                with suppress(StoreError):
                    self._catalog.delete_unused(digest)
            raise
        if self.backend.size(text_key(digest)) is None:  # deleted meanwhile
            self._catalog.add(text, terms)
        self._seen[digest] = text
        return length_of(parts)

    def put_version(self, version: Version) -> int:
        """Write a version's rows, where all of its chunks are stored."""
        self._check_writable()
        if version.entry is None:
            raise ValueError("a version without its rows has nothing to store")
        parts = list(encode(version.entry, version.stored_as, to_field(version)).parts())
        key = _key_of(version)
        self.backend.check_room(key, length_of(parts))
        self._catalog.note_behind(version.prefix, key)
        self.backend.put(key, parts)
        texts = (version.text, *version.prefix)
        if any(self.backend.size(text_key(digest_of_text(text))) is None for text in texts):
            self.backend.delete(key)  # one was deleted meanwhile
            return 0
        return length_of(parts)

    def versions(self, text: str, fingerprint: Fingerprint) -> list[Version]:
        """Return the versions of a chunk's entry; a damaged one is deleted."""
        found = list[Version]()
        try:
            keys = [key.name for key in self.backend.scan(versions_of(digest_of_text(text)))]
            for key, blob in zip(keys, self.backend.get_many(keys), strict=True):
                if blob is None:
                    continue
                try:
                    version = version_in(read_header(memoryview(blob))[0])
                except RefusedEntryError as refused:
                    self._refuse(key, blob, refused)
                    continue
                if (version.text, version.fingerprint, _key_of(version)) == (
                    text,
                    fingerprint,
                    key,
                ):
                    found.append(version)
        except (OSError, ValueError) as error:  # may be temporary
            logger.warning("cannot read the versions of a chunk: %s", error)
        return found

    def read_version(self, version: Version) -> ChunkKV | None:
        """Return a version's rows, each layer verified."""
        key = _key_of(version)
        try:
            blob = self.backend.get(key)
            if blob is None:
                return None
            try:
                wanted = version.text, version.stored_as, to_field(version)
                return open_entry(blob, *wanted, copy=True).whole()
            except RefusedEntryError as refused:
                self._refuse(key, blob, refused)
            except CorruptEntryError as corrupt:
                self._refuse(key, blob, RefusedEntryError(corrupt.reason, str(corrupt)))
        except (OSError, ValueError) as error:  # may be temporary
            logger.warning("cannot read the version %s: %s", key, error)
        return None

    def delete_version(self, version: Version) -> None:
        """Delete a version's rows; what is noted of it stays until ``gc``."""
        self._check_writable()
        self.backend.delete(_key_of(version))

    def retain(self, text: str, fingerprint: Fingerprint, terms: Terms) -> bool:
        """Update the text's row and documents."""
        self._check_writable()
        stored = self.contains(text, fingerprint)
        if stored:
            self._catalog.add(text, terms)
        return stored

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the row exists and has not expired, and the entry is not torn."""
        digest = digest_of_text(text)
        try:
            if self.backend.size(entry_key(digest, digest_of_fingerprint(fingerprint))) is None:
                return False
            row = self._catalog.row(digest)
        except StoreError:
            return False
        return row is not None and not has_expired(row.expires_at, time.time())

    def expiry(self, text: str) -> float | None:
        """Return the time in the text's row."""
        row = self._catalog.row(digest_of_text(text))
        return None if row is None else row.expires_at

    def fingerprints(self, text: str) -> list[Fingerprint]:
        """Read the headers of the chunk's entries."""
        found = list[Fingerprint]()
        with suppress(OSError, ValueError, RefusedEntryError):
            for key in self.backend.scan(entries_of(digest_of_text(text))):
                blob = self.backend.get(key.name)
                if blob is not None:
                    found.append(read_header(memoryview(blob))[0].fingerprint)
        return found

    def documents(self, text: str) -> list[str]:
        """Return the documents in the catalog, sorted."""
        return sorted(self._catalog.documents_of(digest_of_text(text)))

    def delete(self, text: str) -> int:
        """Delete the text's row, then its entries."""
        self._check_writable()
        return self._catalog.delete(digest_of_text(text))

    def keep_only(self, document: str, texts: Iterable[str], revision: str | None = None) -> int:
        """See :meth:`Store.keep_only`."""
        self._check_writable()
        kept = set(map(digest_of_text, texts))
        gone = [digest for digest in self._catalog.texts_of(document) if digest not in kept]
        return sum([self._catalog.drop_holder(document, digest, revision) for digest in gone])

    # ---- all of them

    def entries(self) -> Iterator[EntryInfo]:
        """Entries in the order of their keys; those of other format versions are left out."""
        documents = self._catalog.documents()
        found = groupby(self._entries(), lambda entry: entry[0])
        grouped = ((digest, list(group)) for digest, group in found)
        for digest, row, group in self._catalog.with_rows(grouped):
            documents_of = tuple(sorted(documents.get(digest, ())))
            for _, fingerprint, nbytes in group:
                yield EntryInfo(row.text, fingerprint, nbytes, documents_of, row.expires_at)

    def texts(self) -> Iterator[str]:
        """Texts in the order of their digests."""
        found = groupby(self._entries(), lambda entry: entry[0])
        rows = self._catalog.with_rows((digest, None) for digest, _ in found)
        return (row.text for _, row, _ in rows)

    def changes(self, since: int) -> Changes:
        """See :meth:`Store.changes`. Deleted texts are known by the names that were seen here."""
        newest, added, removed = self._catalog.changes(since, {*self._deleted, *self._seen})
        self._seen |= added
        known = self._deleted | self._seen
        gone = [digest for digest in removed if digest in known]
        for digest in gone:  # another finder or tier may still ask for them
            self._seen.pop(digest, None)
            self._deleted.pop(digest, None)
            self._deleted[digest] = known[digest]
        for digest in list(self._deleted)[:-_DELETED_KEPT]:
            self._deleted.pop(digest, None)
        return Changes(newest, list(added.values()), [known[digest] for digest in gone])

    def gc(self) -> int:
        """Delete expired chunks and the remains of interrupted writers.

        Processes that are writing put back what this deletes under them.
        """
        self._check_writable()
        now = time.time()
        removed = 0
        for digest in sorted(self._catalog.digests() | {entry[0] for entry in self._entries()}):
            entries = self._catalog.delete_expired(digest, now)
            if entries is None:
                self._catalog.delete_unused(digest)
            elif entries:
                removed += 1
        self._catalog.drop_unused_versions()
        self._catalog.compact_log()
        return removed

    def room(self) -> Room | None:
        """Return what the backend's disk has left."""
        free = self.backend.free_bytes()
        return None if free is None else Room(*free)

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
        """Delete a damaged entry, unless it was written again since it was read."""
        logger.warning("unusable chunk cache %s: %s (%s)", key, str(refused), refused.reason)
        if not self.read_only and refused.reason != "codec":
            with suppress(StoreError):
                now = self.backend.get(key)
                if now is not None and memoryview(now) == memoryview(seen):
                    self.backend.delete(key)

    def _must_copy(self, blob: Blob) -> bool:
        # decoding needs writable memory that nobody else can change
        return not self.mapped if isinstance(blob, mmap.mmap) else isinstance(blob, bytes)

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError("the store was opened read_only")


def _key_of(version: Version) -> str:
    return version_key(digest_of_text(version.text), version.stored_as.digest)
