"""A store: ChunkKVs of one namespace by text and fingerprint, over any backend.

A text's row is written before its entry and deleted before its entries, and checked again after an
entry is written. An interrupted operation therefore leaves a miss, which the next precompute
repairs. See docs/store-format.md.
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
"""Number of recently deleted texts that are remembered; more if one change deleted more."""


class ChunkStore:
    """Keeps one namespace's entries in a backend.

    Several threads can share a store, and several processes can open the same place. ``open`` and
    ``get`` never raise for damaged, foreign or unknown entries: these are misses with a reason. A
    writable store also deletes an entry that can never be read, so that ``contains`` is False and
    the next precompute writes it again.

    Parameters
    ----------
    backend
        Contains only this namespace. Closed together with the store.
    namespace
        Any text.
    read_only
        Write nothing. Damaged entries stay where they are.
    mapped
        True: entries are views into the backend's memory maps. They must not be kept, since
        truncating the file would kill the process. False: entries own their memory.
    eviction
        Evicts chunks when the backend is full; None: StoreFullError.

    Raises
    ------
    StoreError
        The backend cannot be reached, or belongs to another namespace or version; from methods that
        write: the place cannot be written.

    Notes
    -----
    If one process forgets a document while another puts the same chunk for another document, the
    chunk can be deleted: a miss until it is precomputed again.
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
        self._seen: dict[str, str] = {}  # texts that finders and tiers can know, by digest
        self._deleted: dict[str, str] = {}  # deleted ones, the last at the end
        try:
            self.catalog = Catalog(backend, namespace)
        except BaseException:
            backend.close()
            raise

    # ---- entries

    def open(self, text: str, fingerprint: Fingerprint) -> Found[LayeredKV]:
        """Return the chunk's entry for this fingerprint; its layers can be lazy.

        A lazy layer is verified when it is read. A corrupt one raises
        :class:`ragkv.store.entry.lazy.CorruptEntryError`, and the entry is deleted.
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
        except (OSError, ValueError) as error:  # perhaps temporary: keep the entry
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
        """Write an entry, as durably as the backend can, and return its bytes.

        An entry of the same text and fingerprint is replaced. The tensors can be views and on any
        device; ``get`` returns them on the CPU.

        Raises
        ------
        StoreFullError
            The disk or the quota is full; nothing of the entry remains.
        StoreError
            The place cannot be written, or the entry does not fit its fingerprint.
        """
        self._check_writable()
        parts = encode(entry, fingerprint)
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
        """Write an entry's bytes, made by :func:`ragkv.store.entry.format.encode`."""
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
        """Apply ``terms`` to an entry if it is stored; return whether it is."""
        self._check_writable()
        stored = self.contains(text, fingerprint)
        if stored:
            self.catalog.add(text, terms)
        return stored

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the entry is stored and has not expired; its tensors are not read."""
        digest = digest_of_text(text)
        try:
            if self.backend.size(entry_key(digest, digest_of_fingerprint(fingerprint))) is None:
                return False
            row = self.catalog.row(digest)
        except StoreError:
            return False
        return row is not None and not has_expired(row.expires_at, time.time())

    def expiry(self, text: str) -> float | None:
        """Return the chunk's expiry time; None for never or for no chunk."""
        row = self.catalog.row(digest_of_text(text))
        return None if row is None else row.expires_at

    def fingerprints(self, text: str) -> list[Fingerprint]:
        """Return the fingerprints of the chunk's entries; never raise."""
        found = list[Fingerprint]()
        with suppress(OSError, ValueError, RefusedEntryError):
            for key in self.backend.scan(entries_of(digest_of_text(text))):
                blob = self.backend.get(key.name)
                if blob is not None:
                    found.append(read_header(blob)[0].fingerprint)
        return found

    def documents(self, text: str) -> list[str]:
        """Return the chunk's documents, sorted."""
        digest = digest_of_text(text)
        return sorted(self.catalog.documents(digest).get(digest, ()))

    # ---- deletions, see Catalog.delete

    def delete(self, text: str) -> int:
        """Delete the chunk's entries under every fingerprint; return how many."""
        self._check_writable()
        if self._eviction is not None:
            self._eviction.remove(text)
        self._deleted[digest_of_text(text)] = text
        return self.catalog.delete(digest_of_text(text))

    def keep_only(self, document: str, texts: Iterable[str], revision: str | None = None) -> int:
        """Reduce a document's chunks to ``texts``; return the number of deleted chunks.

        Chunks without another document are deleted, under every fingerprint. Call this after
        putting the new chunks of a changed document. Chunks of the given revision also stay: other
        calls or processes put them.
        """
        self._check_writable()
        kept = set(map(digest_of_text, texts))
        gone = [digest for digest in self.catalog.texts_of(document) if digest not in kept]
        named = self.catalog.with_rows((digest, None) for digest in gone)
        self._deleted |= {digest: row.text for digest, row, _ in named}
        return sum([self.catalog.drop_holder(document, digest, revision) for digest in gone])

    def forget_document(self, document: str) -> int:
        """Delete the chunks that belong only to this document; return how many."""
        return self.keep_only(document, ())

    def gc(self) -> int:
        """Delete expired chunks and remains of interrupted writes; return the number of chunks.

        A process that is writing a chunk restores the rows that this deletes meanwhile.
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
        """Whether this process evicted the chunk recently, and it is not stored again."""
        return self._eviction is not None and self._eviction.was_evicted(text)

    # ---- all of them

    def entries(self) -> Iterator[EntryInfo]:
        """Yield the metadata of all entries of this format, expired ones included, by key."""
        documents = self.catalog.documents()
        found = groupby(self._entries(), lambda entry: entry[0])
        grouped = ((digest, list(group)) for digest, group in found)
        for digest, row, group in self.catalog.with_rows(grouped):
            documents_of = tuple(sorted(documents.get(digest, ())))
            for _, fingerprint, nbytes in group:
                yield EntryInfo(row.text, fingerprint, nbytes, documents_of, row.expires_at)

    def texts(self) -> Iterator[str]:
        """Yield the texts of all chunks, in the order of their digests."""
        found = groupby(self._entries(), lambda entry: entry[0])
        rows = self.catalog.with_rows((digest, None) for digest, _ in found)
        return (row.text for _, row, _ in rows)

    def changes(self, since: int) -> Changes:
        """Return the texts added and removed after change ``since``, by any process.

        Change numbers only grow, from 0 for an empty store. Finders and tiers follow a store by
        this feed. ``added`` can lack a text that was deleted again, and can contain one that was
        put again; ``removed`` can contain added texts. Only deleted texts that this store has seen
        are reported.

        Raises
        ------
        StoreError
            The place cannot be read. Call again with the same number to miss no deletion.
        """
        newest, added, removed = self.catalog.changes(since, lambda: {*self._deleted, *self._seen})
        self._seen |= added
        gone: dict[str, str] = {}
        for digest in removed:
            last = self._deleted.pop(digest, None)
            if (text := self._seen.pop(digest, last)) is not None:
                gone[digest] = text
        self._deleted |= gone  # other finders and tiers can be behind
        for digest in list(self._deleted)[: -max(_DELETED_KEPT, len(gone))]:
            self._deleted.pop(digest, None)
        return Changes(newest, list(added.values()), list(gone.values()))

    # ---- the place

    def room(self) -> Room | None:
        """Return the free bytes of the disk; None where unknown, as for a server."""
        free = self.backend.free_bytes()
        return None if free is None else Room(*free)

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Return the expected seconds of ``get``, 0 in memory; None if not measured."""
        del text, fingerprint, nbytes
        return 0.0 if self.backend.private else None

    def make_room(self) -> bool:
        """Empty the tiers on the model's device; return whether they had entries."""
        return False

    def tiers_in_use(self) -> tuple[TierUse, ...]:
        """Return the bytes and hits of the tiers, the fastest first."""
        return (TierUse("memory" if self.backend.private else "below", self.nbytes, self._hits),)

    @property
    def nbytes(self) -> int | None:
        """Bytes in memory; None for other places, where they are not counted."""
        return getattr(self.backend, "nbytes", None)

    def close(self) -> None:
        """Release files and connections; the store cannot be used afterwards."""
        self.backend.close()

    def refuse(self, key: str, seen: Blob, refused: RefusedEntryError) -> None:
        """Delete a damaged entry or version unless it changed since it was read."""
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
        # decoding needs writable memory that no other process can change
        return not self.mapped if isinstance(blob, mmap.mmap) else isinstance(blob, bytes)

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError("the store was opened read_only")
