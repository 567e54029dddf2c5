"""A store: ChunkKVs of one namespace by text and fingerprint, over any backend.

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
from ragkv.store.backends.backend import Backend, Blob, Bytes, length_of
from ragkv.store.catalog import Catalog
from ragkv.store.entry.format import encode, open_entry
from ragkv.store.entry.header import RefusedEntryError, read_header
from ragkv.store.names import (
    TextRow,
    digest_of_fingerprint,
    digest_of_text,
    entries_of,
    entry_key,
    parse_entry_key,
    text_key,
)
from ragkv.store.tiers.eviction import Eviction
from ragkv.store.types import Changes, EntryInfo, Found, Room, Terms, TierUse, has_expired

logger = logging.getLogger(__name__)
_DELETED_KEPT = 10_000
"""Deleted texts that are remembered by name: the last ones, and all of the last change."""


class ChunkStore:
    """Keeps one namespace's entries in a backend.

    All methods may be called from several threads, and several processes may open the same
    place. ``open`` and ``get`` never raise for what they find there: a torn, tampered, foreign or
    unknown entry is a miss with its reason. A writable store also deletes an entry that can never
    be read, so that ``contains`` is False and the next precompute writes it again.

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
    eviction
        Deletes chunks for new ones where the backend is full; None: StoreFullError.

    Raises
    ------
    StoreError
        The backend cannot be reached, or belongs to another namespace or another version; from
        methods that write: the place cannot be written.

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
        eviction: Eviction | None = None,
    ) -> None:
        self.backend = backend
        self.remote = backend.remote
        self.read_only = read_only
        self.mapped = mapped
        self._eviction = eviction
        self._hits = 0
        self._seen: dict[str, str] = {}  # texts that finders and tiers may know, by digest
        self._deleted: dict[str, str] = {}  # deleted ones, the last at the end
        try:
            self.catalog = Catalog(backend, namespace)
        except BaseException:
            backend.close()
            raise

    # ---- entries

    def open(self, text: str, fingerprint: Fingerprint) -> Found[LayeredKV]:
        """Return the chunk's entry if its whole fingerprint agrees; its layers may be lazy.

        A lazy layer is verified when it is read: a corrupt one raises
        :class:`ragkv.store.entry.lazy.CorruptEntryError` there, and the entry is deleted.
        """
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
            try:
                copy, private = self._must_copy(blob), self.backend.private
                entry = open_entry(blob, text, fingerprint, copy=copy, trusted=private)
            except RefusedEntryError as refused:
                self.refuse(key, blob, refused)
                return Found(None, refused.reason)
        except (OSError, ValueError) as error:  # may be temporary: keep it
            logger.warning("cannot read the chunk cache %s: %s", key, error)
            return Found(None, "unreadable")
        self._seen[digest] = text
        self._count_use(text, len(entry.token_ids))
        self._hits += 1
        if self.backend.private:
            return Found(entry.whole(), expires_at=row.expires_at)
        entry.on_corrupt(partial(self.refuse, key, blob))
        return Found(entry, expires_at=row.expires_at)

    def get(self, text: str, fingerprint: Fingerprint) -> Found[ChunkKV]:
        """Return the chunk's entry with all layers loaded and verified."""
        return self.open(text, fingerprint).load_all()

    def put(self, entry: ChunkKV, fingerprint: Fingerprint, terms: Terms = Terms()) -> int:
        """Write an entry and return its bytes; then it is as durable as the backend makes it.

        An entry of the same text and fingerprint is replaced. The tensors may be views
        and may lie on any device; entries come back on the CPU.

        Raises
        ------
        StoreFullError
            The disk or the quota is full; nothing of the entry remains.
        StoreError
            The place cannot be written, or the entry does not fit its fingerprint.
        """
        self._check_writable()
        parts = list(encode(entry, fingerprint).parts())
        write = partial(self._write, entry, fingerprint, parts, terms)
        if self._eviction is None:
            return write()
        return self._eviction.write(self, entry, length_of(parts), write)

    def _write(
        self, entry: ChunkKV, fingerprint: Fingerprint, parts: Sequence[Bytes], terms: Terms
    ) -> int:
        return self.put_encoded(entry.text, fingerprint, parts, terms)

    def put_encoded(
        self, text: str, fingerprint: Fingerprint, parts: Sequence[Bytes], terms: Terms = Terms()
    ) -> int:
        """Write an entry's bytes as :func:`ragkv.store.entry.format.encode` made them."""
        self._check_writable()
        digest = digest_of_text(text)
        key = entry_key(digest, digest_of_fingerprint(fingerprint))

        self.backend.check_room(key, length_of(parts))
        known = self.catalog.add(text, terms)
        try:
            self.backend.put(key, parts)
        except BaseException:
            if not known:
                with suppress(StoreError):
                    self.catalog.delete_unused(digest)
            raise
        if self.backend.size(text_key(digest)) is None:  # deleted meanwhile
            self.catalog.add(text, terms)
        self._seen[digest] = text
        return length_of(parts)

    def retain(self, text: str, fingerprint: Fingerprint, terms: Terms) -> bool:
        """Apply ``terms`` to a stored entry, as ``put`` would, without writing its bytes.

        Returns whether the entry is stored; otherwise it has to be put.
        """
        self._check_writable()
        stored = self.contains(text, fingerprint)
        if stored:
            self.catalog.add(text, terms)
        return stored

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether an entry is stored whole and has not expired, without reading its tensors."""
        digest = digest_of_text(text)
        try:
            if self.backend.size(entry_key(digest, digest_of_fingerprint(fingerprint))) is None:
                return False
            row = self.catalog.row(digest)
        except StoreError:
            return False
        return row is not None and not has_expired(row.expires_at, time.time())

    def expiry(self, text: str) -> float | None:
        """Return the time from which on the chunk is a miss; None for never or for no chunk."""
        row = self.catalog.row(digest_of_text(text))
        return None if row is None else row.expires_at

    def fingerprints(self, text: str) -> list[Fingerprint]:
        """Return what the chunk is stored for; never raise."""
        found = list[Fingerprint]()
        with suppress(OSError, ValueError, RefusedEntryError):
            for key in self.backend.scan(entries_of(digest_of_text(text))):
                blob = self.backend.get(key.name)
                if blob is not None:
                    found.append(read_header(blob)[0].fingerprint)
        return found

    def documents(self, text: str) -> list[str]:
        """Return the documents that the chunk belongs to, sorted; none for no chunk."""
        digest = digest_of_text(text)
        return sorted(self.catalog.documents(digest).get(digest, ()))

    # ---- deletions: what they do is told in Catalog.delete

    def delete(self, text: str) -> int:
        """Delete the chunk's entries under every fingerprint; return how many."""
        self._check_writable()
        if self._eviction is not None:
            self._eviction.remove(text)
        self._deleted[digest_of_text(text)] = text
        return self.catalog.delete(digest_of_text(text))

    def keep_only(self, document: str, texts: Iterable[str], revision: str | None = None) -> int:
        """Reduce a document's chunks to ``texts``; return the number of deleted chunks.

        Chunks of no other document are deleted, under every fingerprint. This is for a
        document that was ingested again: its new chunks are put first. Chunks of the given
        revision stay, too: other calls, and other processes, put them.
        """
        self._check_writable()
        kept = set(map(digest_of_text, texts))
        gone = [digest for digest in self.catalog.texts_of(document) if digest not in kept]
        named = self.catalog.with_rows((digest, None) for digest in gone)
        self._deleted |= {digest: row.text for digest, row, _ in named}
        return sum([self.catalog.drop_holder(document, digest, revision) for digest in gone])

    def forget_document(self, document: str) -> int:
        """Delete the chunks that belong to this document alone; return how many."""
        return self.keep_only(document, ())

    def gc(self) -> int:
        """Delete expired chunks and the remains of interrupted writers; return the chunks.

        Processes that are writing put back what this deletes under them.
        """
        self._check_writable()
        now = time.time()
        removed = 0
        for digest in sorted(self.catalog.digests() | {entry[0] for entry in self._entries()}):
            entries = self.catalog.delete_expired(digest, now)
            if entries is None:
                self.catalog.delete_unused(digest)
            elif entries:
                removed += 1
        self.catalog.drop_unused_versions()
        self.catalog.compact_log()
        return removed

    def was_evicted(self, text: str) -> bool:
        """Whether this process evicted the chunk, lately, and it is not stored again."""
        return self._eviction is not None and self._eviction.was_evicted(text)

    # ---- all of them

    def entries(self) -> Iterator[EntryInfo]:
        """Yield the metadata of all entries, expired ones included, in the order of their keys.

        Those of other format versions are left out.
        """
        documents = self.catalog.documents()
        found = groupby(self._entries(), lambda entry: entry[0])
        grouped = ((digest, list(group)) for digest, group in found)
        for digest, row, group in self.catalog.with_rows(grouped):
            documents_of = tuple(sorted(documents.get(digest, ())))
            for _, fingerprint, nbytes in group:
                yield EntryInfo(row.text, fingerprint, nbytes, documents_of, row.expires_at)

    def texts(self) -> Iterator[str]:
        """Yield all chunk texts in the namespace, each once, in the order of their digests."""
        found = groupby(self._entries(), lambda entry: entry[0])
        rows = self.catalog.with_rows((digest, None) for digest, _ in found)
        return (row.text for _, row, _ in rows)

    def changes(self, since: int) -> Changes:
        """Return the texts added and removed after change ``since``, by any process.

        Change numbers only grow, starting from 0 for an empty store. Finders and tiers follow
        a store by this feed. A text that was added and deleted meanwhile may be missing from
        ``added``; one that was put again may be in it, and other added texts in ``removed``.
        Deleted texts are known by the names that were seen here.

        Raises
        ------
        StoreError
            The place cannot be read: call again with the same number, or deletions are missed.
        """
        newest, added, removed = self.catalog.changes(since, lambda: {*self._deleted, *self._seen})
        self._seen |= added
        gone: dict[str, str] = {}
        for digest in removed:
            last = self._deleted.pop(digest, None)
            if (text := self._seen.pop(digest, last)) is not None:
                gone[digest] = text
        self._deleted |= gone  # another finder or tier may still ask for them
        for digest in list(self._deleted)[: -max(_DELETED_KEPT, len(gone))]:
            self._deleted.pop(digest, None)
        return Changes(newest, list(added.values()), list(gone.values()))

    # ---- the place

    def room(self) -> Room | None:
        """Return what the disk has left; None where that is not known, as of a server."""
        free = self.backend.free_bytes()
        return None if free is None else Room(*free)

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Return the seconds that ``get`` may take, 0 in memory; None: nothing was measured."""
        del text, fingerprint, nbytes
        return 0.0 if self.backend.private else None

    def make_room(self) -> bool:
        """Empty the tier of copies on the model's device; return whether it had anything."""
        return False

    def tiers_in_use(self) -> tuple[TierUse, ...]:
        """Return what the tiers hold and have served, the fastest first."""
        return (TierUse("memory" if self.backend.private else "below", self.nbytes, self._hits),)

    @property
    def nbytes(self) -> int | None:
        """Bytes in memory; None for other places, where nobody counts them."""
        return getattr(self.backend, "nbytes", None)

    def close(self) -> None:
        """Release files and connections; the store cannot be used afterwards."""
        self.backend.close()

    def refuse(self, key: str, seen: Blob, refused: RefusedEntryError) -> None:
        """Delete a damaged entry or version, unless it was written again since it was read."""
        logger.warning("unusable chunk cache %s: %s (%s)", key, str(refused), refused.reason)
        if not self.read_only:
            with suppress(StoreError):
                self.backend.delete_unchanged(key, seen)

    def _count_use(self, text: str, tokens: int) -> None:
        if self._eviction is not None:
            self._eviction.use(text, tokens)

    def _entries(self) -> Iterator[tuple[str, str, int]]:
        """Yield the digests of text and fingerprint of each entry, and its bytes."""
        for key, nbytes in self.backend.scan("kv/"):
            found = parse_entry_key(key)
            if found is not None:
                yield *found, nbytes

    def _must_copy(self, blob: Blob) -> bool:
        # decoding needs writable memory that nobody else can change
        return not self.mapped if isinstance(blob, mmap.mmap) else isinstance(blob, bytes)

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError("the store was opened read_only")
