"""The contract that every place of storage keeps."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.model.fingerprint import Fingerprint

KEPT = -math.inf
"""As ``expires_at``: what is there keeps its time, what is new has none."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer to :meth:`Store.get`: an entry, or the reason why there is none.

    ``reason`` is empty on a hit, otherwise one of

    ``absent``
        The text is not stored.
    ``fingerprint``
        The text is stored, but for another model, sink, dtype or codec.
    ``tokens``
        The entry under this text's key is of another text, so of other tokens.
    ``checksum``
        The entry's bytes are not those that were written.
    ``format``
        It is an entry of a version that this ragkv does not read, or no entry.
    ``codec``
        The package that its codec needs is not installed here; the entry stays.
    ``expired``
        Its time is over. ``gc`` removes it.
    ``unreadable``
        Its bytes, or the place they lie in, cannot be read, are cut short or missing.

    ``expires_at`` is the time at which a hit becomes a miss, None for never; tiers above
    keep it with their copy.
    """

    entry: ChunkKV | None
    reason: str = ""
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to :meth:`Store.open`: as :class:`Lookup`, but layers may still be arriving."""

    entry: LayeredKV | None
    reason: str = ""
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What is known of a stored entry without reading it.

    Parameters
    ----------
    text
        The chunk.
    fingerprint
        :attr:`Fingerprint.digest <ragkv.model.fingerprint.Fingerprint.digest>` of the model,
        sink and codec.
    nbytes
        Bytes that the entry takes where it lies.
    documents
        The documents that hold the chunk, sorted.
    expires_at
        Seconds since the epoch; None for never.
    """

    text: str
    fingerprint: str
    nbytes: int
    documents: tuple[str, ...] = ()
    expires_at: float | None = None


class Store(ABC):
    """Keeps ChunkKVs of one namespace by (text, fingerprint).

    All methods may be called from several threads, and several processes may open
    the same place. ``get`` never raises for what it finds there: a torn, tampered,
    foreign or unknown entry is a miss with its reason. Where the store may write, an
    entry that will never be readable is also removed, so that ``contains`` says False
    and the next precompute puts it back.
    """

    far: bool = False
    """Whether entries cross a network: several at once take no longer than one."""

    @abstractmethod
    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Return the chunk's entry if its whole fingerprint and checksum agree."""

    def open(self, text: str, fingerprint: Fingerprint) -> Opened:
        """Return the entry like ``get``, perhaps with its layers still to be read.

        Whoever uses a layer verifies it first: one that does not hold raises
        :class:`ragkv.store.entry.lazy.CorruptEntryError` there, and counts as ``get``'s misses do.
        """
        lookup = self.get(text, fingerprint)
        return Opened(lookup.entry, lookup.reason, lookup.expires_at)

    @abstractmethod
    def put(
        self,
        entry: ChunkKV,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> int:
        """Write an entry atomically and return the bytes it takes.

        An entry of the same text and fingerprint is replaced. The tensors may be views
        and may lie on any device; entries come back on the CPU. The bytes are 0 where a
        store that may forget entries has not kept this one.

        Parameters
        ----------
        document
            What the chunk was cut from. A chunk may be held by several documents.
        expires_at
            Seconds since the epoch (``time.time()``) from which on the chunk is a miss;
            None for never. A chunk that is put or held several times lives until the
            latest of the times; :data:`KEPT` leaves the time of what is there.

        Raises
        ------
        StoreFullError
            The disk or the quota is full; nothing of the entry remains.
        StoreError
            The place cannot be written, or the entry does not fit its fingerprint.
        """

    @abstractmethod
    def hold(
        self,
        text: str,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> bool:
        """Do for an entry that is there what ``put`` does beside writing its bytes.

        Returns whether the entry is there; where it is not, it has to be put.

        Raises
        ------
        StoreError
            The place cannot be written.
        """

    @abstractmethod
    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether an entry is there, without reading its tensors."""

    @abstractmethod
    def expiry(self, text: str) -> float | None:
        """Return the time from which on the chunk is a miss; None for never or for no chunk."""

    @abstractmethod
    def delete(self, text: str) -> int:
        """Remove the chunk's entries under every fingerprint; return how many."""

    @abstractmethod
    def keep_only(self, document: str, texts: Iterable[str]) -> int:
        """Let a document hold none of its chunks but ``texts``; return the chunks removed.

        What no other document holds is deleted, under every fingerprint. This is for a
        document that was ingested again: its new chunks are put first.
        """

    def forget_document(self, document: str) -> int:
        """Remove the chunks that this document alone holds; return how many."""
        return self.keep_only(document, ())

    @abstractmethod
    def entries(self) -> Iterator[EntryInfo]:
        """Say what is stored, expired entries included."""

    def gc(self) -> int:
        """Remove expired chunks, and what crashed writers left; return the chunks removed."""
        now = time.time()
        expired = {e.text for e in self.entries() if has_expired(e.expires_at, now)}
        return sum(self.delete(text) > 0 for text in expired)

    @abstractmethod
    def changes(self, since: int) -> tuple[int, list[str]]:
        """Return the store's change number and the texts that came after ``since``.

        Change numbers only grow, starting from 0 for an empty store. This is how a
        finder learns of chunks, its own process's and other processes'. A text that
        was deleted meanwhile may be missing from the list; one that was there before
        and was put again may be in it.
        Deleting a text is a change, too: see :meth:`deletions`.

        Raises
        ------
        StoreError
            The place cannot be read: ask again from the same number, or deletions are lost.
        """

    def deletions(self, since: int) -> list[str]:
        """Return the texts deleted after change ``since``, by anyone.

        Asked for where the change number has moved: finders and tiers above forget these.
        Those that were put again are among them, and in ``changes``, too: a finder takes the
        deleted ones out first. Others that came since may be among them. A place
        that several processes share overrides this. Raises as :meth:`changes` does.
        """
        del since
        return []

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Return how long ``get`` is going to take for an entry of this many bytes of KV.

        0 where it is in memory, None where nothing of the kind has been measured.
        """
        del text, fingerprint, nbytes
        return None

    def make_room(self) -> bool:
        """Let go of what lies on the model's device; return whether anything did.

        What it held is still in the tiers below.
        """
        return False

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """All chunk texts in the namespace, each once."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections; the store can not be used afterwards."""


def has_expired(expires_at: float | None, now: float) -> bool:
    """Whether a time is over."""
    return expires_at is not None and expires_at <= now


def later(first: float | None, second: float | None) -> float | None:
    """Return the later of two times at which something expires; None is never."""
    latest = None if first is None or second is None else max(first, second)
    return None if latest == KEPT else latest
